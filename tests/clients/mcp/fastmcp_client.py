"""fastmcp's client: save, search, get, list, and a fault of form; prints one JSON object.

usage: fastmcp_client.py http <url> <key>   or   fastmcp_client.py stdio <command> [args…]
"""

import asyncio
import json
import os
import sys

from fastmcp import Client
from fastmcp.client.transports import StdioTransport, StreamableHttpTransport


def transport():
    kind, *rest = sys.argv[1:]
    if kind == "http":
        return StreamableHttpTransport(rest[0], headers={"Authorization": f"Bearer {rest[1]}"})
    return StdioTransport(command=rest[0], args=rest[1:], env=dict(os.environ))


async def main():
    async with Client(transport()) as client:
        tools = await client.list_tools()
        content = f"The fastmcp client over {sys.argv[1]} remembers quokkas"
        saved = await client.call_tool("memory_save", {"content": content})
        found = await client.call_tool("memory_search", {"query": "quokkas"})
        got = await client.call_tool("memory_get", {"id": saved.structured_content["id"]})
        missing = await client.call_tool("memory_get", {"id": "mem_" + "0" * 26}, raise_on_error=False)
        prompt = await client.get_prompt("context", {"query": "quokkas"})
        try:
            await client.call_tool("memory_search", {"query": "x", "limt": 3})
            fault = {}
        except Exception as error:
            fault = {"code": getattr(error, "code", None), "message": str(error)}
    print(
        json.dumps(
            {
                "tools": [tool.name for tool in tools],
                "id": saved.structured_content["id"],
                "hits": [hit["id"] for hit in found.structured_content["hits"]],
                "content": got.structured_content["content"],
                "missing": {"isError": missing.is_error, "text": missing.content[0].text},
                "fault": fault,
                "prompt": prompt.messages[0].content.text,
            }
        )
    )


asyncio.run(main())
