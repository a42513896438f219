// The TypeScript SDK, both packages: save, search, get, list, and a fault of form.
// usage: node sdk.mjs sdk|client http <url> <key>   or   sdk|client stdio <command> [args…]
// Prints one JSON object.
const [, , pkg, transport, ...rest] = process.argv;

let Client, makeTransport;
if (pkg === "sdk") {
  ({ Client } = await import("@modelcontextprotocol/sdk/client/index.js"));
  const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
  const { StdioClientTransport } = await import("@modelcontextprotocol/sdk/client/stdio.js");
  makeTransport = { StreamableHTTPClientTransport, StdioClientTransport };
} else {
  const main = await import("@modelcontextprotocol/client");
  const stdio = await import("@modelcontextprotocol/client/stdio");
  Client = main.Client;
  makeTransport = { ...main, ...stdio };
}

function open() {
  if (transport === "http") {
    const [url, key] = rest;
    return new makeTransport.StreamableHTTPClientTransport(new URL(url), {
      requestInit: { headers: { Authorization: `Bearer ${key}` } },
    });
  }
  const [command, ...args] = rest;
  return new makeTransport.StdioClientTransport({ command, args, env: process.env });
}

const client = new Client({ name: "clients-test", version: "1.0.0" });
await client.connect(open());
const { tools } = await client.listTools();
const call = (name, args = {}) => client.callTool({ name, arguments: args });
const content = `The ${pkg} client over ${transport} remembers quokkas`;
const saved = await call("memory_save", { content, tags: ["clients"] });
const found = await call("memory_search", { query: "quokkas" });
const got = await call("memory_get", { id: saved.structuredContent.id });
const missing = await call("memory_get", { id: "mem_" + "0".repeat(26) });
const fault = await call("memory_search", { query: "x", limt: 3 }).catch((error) => ({
  code: error.code,
  message: error.message,
}));
const prompt = await client.getPrompt({ name: "context", arguments: { query: "quokkas" } });
console.log(
  JSON.stringify({
    server: client.getServerVersion(),
    tools: tools.map((tool) => tool.name),
    id: saved.structuredContent.id,
    hits: found.structuredContent.hits.map((hit) => hit.id),
    content: got.structuredContent.content,
    missing: { isError: missing.isError, text: missing.content[0].text },
    fault,
    prompt: prompt.messages[0].content.text,
  }),
);
await client.close();
