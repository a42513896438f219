// Several at once: tick all, how many are ticked, and a range with the shift key.
"use strict";
{
  document.documentElement.classList.add("scripted");
  let last = null;
  const boxes = () => [...document.querySelectorAll(".memories input[type=checkbox]")];

  const tell = () => {
    const all = boxes();
    const ticked = all.filter((box) => box.checked).length;
    for (const place of document.querySelectorAll("[data-ticked]")) {
      place.textContent = ticked ? ` (${ticked})` : "";
      place.closest("button").disabled = !ticked;
    }
    for (const box of document.querySelectorAll("[data-all]")) {
      box.checked = ticked > 0 && ticked === all.length;
      box.indeterminate = ticked > 0 && ticked < all.length;
    }
  };

  document.addEventListener("click", (event) => {
    const box = event.target;
    if (!box.matches?.(".memories input[type=checkbox]")) return;
    const all = boxes();
    if (event.shiftKey && last && all.includes(last)) {
      const [from, to] = [all.indexOf(last), all.indexOf(box)].sort((a, b) => a - b);
      for (const between of all.slice(from, to + 1)) between.checked = box.checked;
    }
    last = box;
  });
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-all]")) for (const box of boxes()) box.checked = event.target.checked;
    tell();
  });
  document.addEventListener("warmstart:list", tell);
  window.addEventListener("pageshow", tell);
  tell();
}
