// A button beside what is to be copied; and a key that was just made is not made again by loading the page anew.
"use strict";
for (const text of document.querySelectorAll("pre.copy")) {
  const frame = document.createElement("div");
  frame.className = "copied";
  text.replaceWith(frame);
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${text.getAttribute("aria-label")}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(text);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 2000);
  });
  frame.append(text, button);
}
if (document.querySelector("[data-once]")) history.replaceState(null, "", location.pathname);
