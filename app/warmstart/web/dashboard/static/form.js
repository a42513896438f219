// Asks before a page with unsaved changes is left, and brings the eye to what stops a save.
"use strict";
{
  const form = document.querySelector("form[data-guard]");
  let changed = Boolean(document.querySelector(".alert, .conflict"));
  form?.addEventListener("input", () => (changed = true));
  form?.addEventListener("submit", () => (changed = false));
  window.addEventListener("beforeunload", (event) => {
    if (changed) event.preventDefault();
  });
  document.querySelector("#conflict")?.focus();
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && form?.contains(event.target)) form.requestSubmit();
  });
}
