"""The columns of requests.csv, for who writes it and who reads it without Locust."""

from __future__ import annotations

from typing import Final

FIELDS: Final = ("due_s", "endpoint", "latency_ms", "service_ms", "status", "ok", "note")
