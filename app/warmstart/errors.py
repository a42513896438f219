"""Every error a caller can meet, in one hierarchy.

WarmstartError
├── ConfigError             the start is refused; lists every fault at once
├── EmbeddingError          no usable vector; never leaves the service as an error
├── CacheUnavailable        the Upstash endpoint gave nothing; likewise
├── BookkeepingUnavailable  Postgres gave nothing; likewise
├── Problem                 has an HTTP status and a stable type (RFC 9457)
│   ├── MalformedRequest    400
│   ├── Unauthorized        401
│   ├── Forbidden           403
│   ├── NotFound            404
│   ├── MethodNotAllowed    405
│   ├── Duplicate           409, with the id of the memory that is there already
│   ├── Conflict            409
│   ├── Expired             409, the 30 days of the trash are over
│   ├── Stale               412
│   ├── TooLarge            413
│   ├── UnsupportedMedia    415
│   ├── Invalid             422, with the field, the limit and the value's size
│   ├── RateLimited         429, with Retry-After
│   ├── TenantAssertion     500, the only one this service answers on purpose
│   ├── StoreUnavailable    503
│   ├── AuthUnavailable     503
│   ├── Migrating           503, with Retry-After
│   ├── Overloaded          503, with Retry-After: too many requests at once
│   └── DiskFull            507
└── ServerUnreachable       the client found no server where it was told to look
"""

from __future__ import annotations

from typing import Any, ClassVar

PROBLEM_BASE = "https://warmstart.invalid/problems/"


class WarmstartError(Exception):
    """The root; `str(error)` is one line a person can act on."""


class ConfigError(WarmstartError):
    """Settings or a home that the service refuses to start with."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(faults))


class EmbeddingError(WarmstartError):
    """No usable vector came back.

    `reason` is a stable word for logs, metrics and `degraded`. `text_at_fault`
    is true where the provider answers for other texts but not for this one.
    """

    def __init__(self, reason: str, detail: str = "", *, text_at_fault: bool = False) -> None:
        self.reason = reason
        self.text_at_fault = text_at_fault
        super().__init__(f"{reason}: {detail}" if detail else reason)


class CacheUnavailable(WarmstartError):
    """The cache gave no answer; everything in it can be done without."""


class BookkeepingUnavailable(WarmstartError):
    """Postgres gave no answer in its time."""


class ServerUnreachable(WarmstartError):
    """No answer from the server the client was told to use."""


class Problem(WarmstartError):
    """An error with a status and a stable type; `extra` goes into the problem object."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, **extra: Any) -> None:
        self.detail = detail
        self.extra = {k: v for k, v in extra.items() if v is not None}
        super().__init__(detail)

    def to_dict(self) -> dict[str, Any]:
        """The RFC 9457 problem object, the same over REST and MCP."""
        return {
            "type": PROBLEM_BASE + self.type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.extra,
        }


class MalformedRequest(Problem):
    status, type, title = 400, "malformed", "The request can't be read"


class Unauthorized(Problem):
    status, type, title = 401, "unauthorized", "No valid API key"


class Forbidden(Problem):
    status, type, title = 403, "forbidden", "This host or origin is not allowed"


class NotFound(Problem):
    status, type, title = 404, "not-found", "Not found"


class MethodNotAllowed(Problem):
    status, type, title = 405, "method-not-allowed", "This method is not served here"


class Duplicate(Problem):
    status, type, title = 409, "duplicate", "An active memory with this content is there already"


class Conflict(Problem):
    status, type, title = 409, "conflict", "The state of the memory forbids this"


class Expired(Problem):
    status, type, title = 409, "expired", "The time in the trash is over"


class Stale(Problem):
    status, type, title = 412, "stale", "The memory changed since it was read"


class TooLarge(Problem):
    status, type, title = 413, "too-large", "The body is too large"


class UnsupportedMedia(Problem):
    status, type, title = 415, "unsupported-media-type", "This content type is not served"


class Invalid(Problem):
    """`errors` lists each fault: field, problem, limit, size."""

    status, type, title = 422, "invalid", "The request breaks a rule"


class RateLimited(Problem):
    status, type, title = 429, "rate-limited", "Too many requests"

    def __init__(self, detail: str, *, retry_after: int) -> None:
        super().__init__(detail, retry_after=retry_after)


class TenantAssertion(Problem):
    """A row of another tenant came back from the store. Ends the request, on every path."""

    status, type, title = 500, "tenant-assertion", "A safety check failed; nothing was returned"


class StoreUnavailable(Problem):
    status, type, title = 503, "store-unavailable", "The memory store does not answer"


class AuthUnavailable(Problem):
    status, type, title = 503, "auth-unavailable", "Keys can't be checked right now"


class Migrating(Problem):
    status, type, title = 503, "migrating", "A migration is running"


class Overloaded(Problem):
    status, type, title = 503, "overloaded", "Too many requests at once"

    def __init__(self, detail: str, *, retry_after: int = 1) -> None:
        super().__init__(detail, retry_after=retry_after)


class DiskFull(Problem):
    status, type, title = 507, "disk-full", "The disk is full"


PROBLEMS: dict[str, type[Problem]] = {cls.type: cls for cls in Problem.__subclasses__()}
