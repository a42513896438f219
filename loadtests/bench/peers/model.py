"""The model of all that are compared, as an OpenAI-compatible endpoint on the port that is its argument."""

from __future__ import annotations

import sys

import uvicorn

from warmstart.local_embedder_server import EmbeddingServer, Model

if __name__ == "__main__":
    uvicorn.run(EmbeddingServer(Model()).app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
