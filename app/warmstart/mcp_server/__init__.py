"""The Model Context Protocol: eight tools and one prompt, once, for both transports."""

from warmstart.mcp_server.http import streamable_http
from warmstart.mcp_server.server import build_server
from warmstart.mcp_server.stdio import run_stdio

__all__ = ["build_server", "run_stdio", "streamable_http"]
