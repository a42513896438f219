"""The Upstash-REST endpoint in front of a Redis: `warmstart redis-rest`.

It follows Upstash's own endpoint where a client can tell: paths, shapes, status
codes, base64. It serves data commands and scripts and no others. What a script
may call is bounded by Redis alone, so give it a Redis user without
`@admin @dangerous @blocking` (`script|kill` is needed to end a script that
hangs), `maxmemory`, and a short `busy-reply-threshold`.
"""

from warmstart.redis_rest.app import create_app, run

__all__ = ["create_app", "run"]
