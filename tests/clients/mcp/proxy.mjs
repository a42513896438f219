// A proxy that adds a bearer key, for clients without an option for headers.
// usage: node proxy.mjs <url> <key>; prints its own url. The Host header goes through as it came.
import http from "node:http";

const [, , target, key] = process.argv;
const upstream = new URL(target);
const server = http.createServer((request, response) => {
  const headers = { ...request.headers, authorization: `Bearer ${key}` };
  const options = { host: upstream.hostname, port: upstream.port, path: request.url, method: request.method, headers };
  const forwarded = http.request(options, (answer) => {
    response.writeHead(answer.statusCode, answer.headers);
    answer.pipe(response);
  });
  forwarded.on("error", () => response.destroy());
  response.on("close", () => forwarded.destroy());
  request.pipe(forwarded);
});
server.listen(0, "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}${upstream.pathname}`));
process.stdin.on("end", () => process.exit(0)).resume();
