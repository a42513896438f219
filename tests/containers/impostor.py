"""Sits at the address of redis, redis-rest or postgres and is at fault: `impostor.py FAULT PORT REAL_HOST`.

Runs in a container of its own, on nothing but the standard library.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import socket
import struct
import sys
from typing import Any, Final

SLOW_S: Final = 3.0
PAGE: Final = b"<html><body><h1>Welcome</h1></body></html>"
#: The beginning of an answer, in the words of who sits there.
BEGINNINGS: Final = {
    "6379": b"$4096\r\nabc",
    "8079": b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 4096\r\n\r\n[{"result":',
    "5432": b"R\0\0\1",
}
#: One number less than the model gives.
NARROW: Final = base64.b64encode(struct.pack("<383f", 1.0, *[0.0] * 382)).decode()


def http(status: str, body: bytes, kind: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """The body of an HTTP request; of another protocol, whatever came first."""
    raw = await reader.read(65536)
    if not raw.startswith(b"POST "):
        return raw
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length:"))
    while len(body) < length:
        body += await reader.read(65536)
    return body


def narrow_answers(body: bytes) -> bytes:
    """Of redis-rest, where each vector in the cache is too short."""

    def answer(name: str, *rest: Any) -> Any:
        return {"PING": "PONG", "MGET": [NARROW] * len(rest), "SET": "OK", "GET": None, "SMEMBERS": []}.get(name, 1)

    return json.dumps([{"result": answer(*command)} for command in json.loads(body)]).encode()


class Impostor:
    def __init__(self, fault: str, port: str, real: str) -> None:
        self.fault, self.port, self.real = fault, port, real

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            if self.fault == "slow":
                await self._slowly(reader, writer)
            else:
                await self._wrongly(await read_request(reader), writer)
        writer.close()

    async def _wrongly(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        match self.fault:
            case "html":
                writer.write(http("200 OK", PAGE, "text/html"))
            case "429":
                writer.write(http("429 Too Many Requests", b'{"error":"too many"}', "application/json"))
            case "500":
                writer.write(http("500 Internal Server Error", b'{"error":"internal"}', "application/json"))
            case "wrong-width":
                writer.write(http("200 OK", narrow_answers(body), "application/json"))
            case "reset":
                writer.write(BEGINNINGS[self.port])
                await writer.drain()
                # closed like this, the other side sees a reset and no end
                link: socket.socket = writer.get_extra_info("socket")
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                await asyncio.sleep(0.05)
                writer.transport.abort()
                return
        await writer.drain()

    async def _slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self.real, int(self.port))
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(pass_on(reader, there_writer, 0.0))
                both.create_task(pass_on(there_reader, writer, SLOW_S))
        except* ConnectionError:
            pass
        finally:
            there_writer.close()


async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
    while data := await reader.read(65536):
        await asyncio.sleep(delay_s)
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError  # ends the other direction, too


async def main(fault: str, port: str, real: str) -> None:
    impostor = Impostor(fault, port, real)
    server = await asyncio.start_server(impostor.serve, None, int(port))
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
