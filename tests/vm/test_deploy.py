"""One machine, from bare to a second version that fails: what an operator does, and what clients see of it."""
