"""The model of all that are compared, as an OpenAI-compatible endpoint: `python -m loadtests.bench.peers.model PORT`.

With `--none` behind the port there is no model: a text's vector is one by chance, always the same for the same text.
"""

from __future__ import annotations

import sys
import zlib
from typing import Any

import numpy as np
import uvicorn

from warmstart.local_embedder_server import EmbeddingServer, Model

WIDTH = 384


class NoModel(Model):
    def __init__(self) -> None:
        """Loads nothing."""

    def embed(self, prefixed: str) -> tuple[Any, int]:
        vector = np.random.default_rng(zlib.crc32(prefixed.encode())).standard_normal(WIDTH).astype(np.float32)
        return vector / np.linalg.norm(vector), 1


if __name__ == "__main__":
    model = NoModel() if sys.argv[2:] == ["--none"] else Model()
    uvicorn.run(EmbeddingServer(model).app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
