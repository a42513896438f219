// Search as you type: the list is fetched from the page's own address, and without this script the form does the same.
"use strict";
{
  const PAUSE_MS = 180;
  const form = document.getElementById("search");
  const field = document.getElementById("q");
  const results = document.getElementById("results");
  const announce = document.getElementById("announce");
  let timer = 0;
  let under_way = null;

  const address = () => {
    const asked = new URLSearchParams(new FormData(form));
    for (const [name, value] of [...asked]) if (!value.trim()) asked.delete(name);
    const text = asked.toString();
    return text ? "/?" + text : "/";
  };

  const show = async () => {
    const here = address();
    under_way?.abort();
    const mine = (under_way = new AbortController());
    results.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch(here + (here.includes("?") ? "&" : "?") + "fragment=1", { signal: mine.signal });
      if (answer.status === 401) {
        location.assign(here);
        return;
      }
      const text = await answer.text();
      if (answer.headers.get("content-type")?.startsWith("text/html")) {
        const page = new DOMParser().parseFromString(text, "text/html");
        results.replaceChildren(...page.body.childNodes);
      } else {
        const box = document.createElement("p");
        box.className = "alert";
        box.textContent = text;
        results.replaceChildren(box);
      }
      history.replaceState(null, "", here);
      announce.textContent = document.getElementById("count")?.textContent ?? text.slice(0, 200);
      document.dispatchEvent(new Event("warmstart:list"));
    } catch (error) {
      if (error.name === "AbortError") return;
      announce.textContent = "The server can't be reached.";
      const box = document.createElement("p");
      box.className = "alert";
      box.textContent = "The server can't be reached. Press Search to try again.";
      results.replaceChildren(box);
    }
    if (under_way === mine) results.removeAttribute("aria-busy");
  };

  if (form) {
    field.addEventListener("input", (event) => {
      clearTimeout(timer);
      if (!event.isComposing) timer = setTimeout(show, PAUSE_MS);
    });
    field.addEventListener("compositionend", () => {
      clearTimeout(timer);
      timer = setTimeout(show, PAUSE_MS);
    });
    form.addEventListener("submit", () => clearTimeout(timer));
    document.addEventListener("keydown", (event) => {
      const typing = event.target.closest("input, textarea, select, [contenteditable]");
      if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
        event.preventDefault();
        field.focus();
        field.select();
      }
    });
  }
}
