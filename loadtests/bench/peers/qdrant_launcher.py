"""mcp-server-qdrant with the given endpoint as its model: run by the Python that has it, which has nothing of ours."""

from __future__ import annotations

import os

import httpx
from mcp_server_qdrant.embeddings.base import EmbeddingProvider  # type: ignore[import-not-found]
from mcp_server_qdrant.mcp_server import QdrantMCPServer  # type: ignore[import-not-found]
from mcp_server_qdrant.settings import QdrantSettings, ToolSettings  # type: ignore[import-not-found]

WIDTH = 384


class Endpoint(EmbeddingProvider):  # type: ignore[misc]
    def __init__(self) -> None:
        self._http = httpx.AsyncClient(timeout=60)

    async def embed_documents(self, documents: list[str]) -> list[list[float]]:
        return [await self.embed_query(document) for document in documents]

    async def embed_query(self, query: str) -> list[float]:
        answer = await self._http.post(os.environ["MODEL_URL"], json={"model": os.environ["MODEL"], "input": query})
        vector: list[float] = answer.raise_for_status().json()["data"][0]["embedding"]
        return vector

    def get_vector_name(self) -> str:
        return "e5"

    def get_vector_size(self) -> int:
        return WIDTH


QdrantMCPServer(ToolSettings(), QdrantSettings(), embedding_provider=Endpoint()).run(transport="stdio")
