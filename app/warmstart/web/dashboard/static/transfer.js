// An import: the file's lines are sent in parts, as they are, so that a large file needs little memory and loses nothing.
"use strict";
{
  document.documentElement.classList.add("scripted");
  const form = document.getElementById("import");
  const bar = document.getElementById("progress");
  const outcome = document.getElementById("outcome");
  const { bytes, memories, token } = form.dataset;
  const encoder = new TextEncoder();

  // A JSON export is written with one memory a line, so both forms are read alike.
  async function* lines(file) {
    let rest = "";
    let read = 0;
    const reader = file.stream().pipeThrough(new TextDecoderStream("utf-8", { fatal: true })).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      read += encoder.encode(value).length;
      const found = rest.split("\n");
      rest = found.pop();
      for (const line of found) yield [line, read];
    }
    if (rest) yield [rest, read];
  }

  async function* parts(file) {
    let part = [];
    let size = 0;
    let first = true;
    for await (const [raw, read] of lines(file)) {
      const line = raw.trim().replace(/,$/, "");
      if (first && line) {
        first = false;
        if (!line.startsWith("{") || !line.includes('"schema"')) throw new Error("This is no export of Warmstart.");
        continue;
      }
      if (!line || line === "]}") continue;
      const length = encoder.encode(line).length + 1;
      if (part.length && (part.length >= Number(memories) || size + length > Number(bytes))) {
        yield [part, read];
        part = [];
        size = 0;
      }
      part.push(line);
      size += length;
    }
    if (first) throw new Error("The file is empty.");
    if (part.length) yield [part, file.size];
  }

  const send = async (part) => {
    const answer = await fetch("/transfer/import", {
      method: "POST",
      headers: { "Content-Type": "application/x-ndjson", "X-CSRF-Token": token },
      body: part.join("\n"),
    });
    if (answer.status === 429 || answer.status === 503) {
      await new Promise((later) => setTimeout(later, 1000 * Number(answer.headers.get("Retry-After") ?? 1)));
      return send(part);
    }
    const told = await answer.json();
    if (!answer.ok) throw new Error(told.detail ?? told.title);
    return told;
  };

  const words = (total) => {
    const said = [`${total.created} imported`];
    if (total.unchanged) said.push(`${total.unchanged} were here already`);
    if (total.duplicates) said.push(`${total.duplicates} left out, since another memory has their text`);
    if (total.differing) said.push(`${total.differing} left as they are here, since they changed after the export`);
    if (total.renamed) said.push(`${total.renamed} with a new id`);
    return said.join("; ");
  };

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const file = document.getElementById("file").files[0];
    const button = form.querySelector("button");
    const total = { created: 0, unchanged: 0, duplicates: 0, differing: 0, renamed: 0 };
    button.disabled = true;
    bar.hidden = false;
    bar.value = 0;
    outcome.className = "";
    try {
      for await (const [part, read] of parts(file)) {
        const told = await send(part);
        for (const name of Object.keys(total)) total[name] += told[name];
        bar.value = read / file.size;
        outcome.textContent = `${words(total)} so far`;
      }
      outcome.textContent = `Done: ${words(total)}.`;
    } catch (error) {
      outcome.className = "alert";
      outcome.textContent = `Stopped: ${error.message} ${words(total)} before that; the rest can be imported by running it again.`;
    }
    button.disabled = false;
  });
}
