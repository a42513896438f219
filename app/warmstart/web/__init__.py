"""The HTTP surface: REST, the way in for MCP, health and metrics."""
