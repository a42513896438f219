"""Those who use the memory, each as a visit: requests one after the other, the first one due when the plan says."""
