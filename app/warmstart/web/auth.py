"""Who may come in: host and origin, API key, rate limits. Pure ASGI, in front of every route."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from warmstart.config import Settings
from warmstart.errors import AuthUnavailable, ConfigError, Forbidden, Overloaded, RateLimited, Unauthorized
from warmstart.web.runtime import Runtime

if TYPE_CHECKING:
    from warmstart.keys import Identity
    from warmstart.ratelimit import Allowance

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
#: The health check of a load balancer names the host as it likes.
HOST_EXEMPT: Final = frozenset({"/healthz"})
#: Probes must get through where requests no longer do.
LOAD_EXEMPT: Final = frozenset({"/healthz", "/readyz", "/metrics"})
#: Longer ones are refused unseen.
MAX_KEY: Final = 256

#: Where in the scope a middleware leaves headers for the answer, whoever gives it.
ANSWER_HEADERS: Final = "warmstart.headers"

_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:@/\[\]]+))(?::[0-9]{1,5})?")


def needs_key(path: str) -> bool:
    return path in ("/v1", "/mcp") or path.startswith(("/v1/", "/mcp/"))


class Hosts:
    """The names this server answers to, against DNS rebinding."""

    def __init__(self, settings: Settings) -> None:
        self.names = {_canonical(name) for name in (*LOOPBACK_NAMES, *settings.allowed_hosts)}
        if (address := parse_address(settings.host)) is None or not address.is_unspecified:
            self.names.add(_canonical(settings.host))

    def check(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or _host_name(hosts[0]) not in self.names:
            raise Forbidden(
                f"this server does not answer to the host {', '.join(hosts)[:100]!r}; "
                "name it in ALLOWED_HOSTS if it is right"
            )
        origin = headers.get("origin")
        if origin is not None and _host_name(_authority(origin)) not in self.names:
            raise Forbidden(
                f"the origin {origin[:100]!r} is not allowed; name its host in ALLOWED_HOSTS if it is right"
            )


class Clients:
    """The address a request came from, through trusted proxies only."""

    def __init__(self, settings: Settings) -> None:
        try:
            self.trusted = [ipaddress.ip_network(a, strict=False) for a in settings.trusted_proxies]
        except ValueError as error:
            raise ConfigError([f"TRUSTED_PROXIES: {error}; give addresses or networks such as 10.0.0.0/8"]) from None

    def address(self, scope: Scope, headers: Headers) -> str:
        """The rightmost address that is no trusted proxy; an IPv6 one stands for its /64."""
        peer = (scope.get("client") or ("unknown",))[0]
        found = parse_address(peer)
        if found is None:
            return str(peer)
        hops = [hop.strip() for hop in ",".join(headers.getlist("x-forwarded-for")).split(",")]
        while self._is_trusted(found) and hops and (hop := parse_address(hops.pop())):
            found = hop
        if isinstance(found, ipaddress.IPv6Address):
            return str(ipaddress.ip_network((found, 64), strict=False))
        return str(found)

    def is_secure(self, scope: Scope, headers: Headers) -> bool:
        """Whether the client speaks TLS, to this process or to a trusted proxy before it."""
        if scope["scheme"] == "https":
            return True
        peer = parse_address((scope.get("client") or ("",))[0])
        forwarded = headers.get("x-forwarded-proto", "").rpartition(",")[2].strip()
        return peer is not None and self._is_trusted(peer) and forwarded == "https"

    def _is_trusted(self, address: IPAddress) -> bool:
        return any(address in network for network in self.trusted)


class HostCheck:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in HOST_EXEMPT:
            scope["state"]["hosts"].check(Headers(scope=scope))
        await self.app(scope, receive, send)


class LoadLimit:
    """Requests served at once; over the limit it is better to say so than to queue."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.serving = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in LOAD_EXEMPT:
            await self.app(scope, receive, send)
            return
        limit = scope["state"]["runtime"].settings.max_concurrent_requests
        if self.serving >= limit:
            raise Overloaded(f"{limit} requests are being served already; try again in a second")
        self.serving += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.serving -= 1


class Authentication:
    """Sets `scope["user"]` on every path that needs a key."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and needs_key(scope["path"]):
            runtime, headers = scope["state"]["runtime"], Headers(scope=scope)
            identity = await log_in(scope, runtime, scope["state"]["clients"], lambda: _bearer(headers))
            await count_request(scope, runtime, identity)
        await self.app(scope, receive, send)


async def log_in(scope: Scope, runtime: Runtime, clients: Clients, key: Callable[[], str]) -> Identity:
    """Whose the API key is that `key` gives. Failures are counted by address, and over the limit none is looked at."""
    limiter, count = runtime.limiter, runtime.metrics.login
    address = clients.address(scope, Headers(scope=scope))
    failures = runtime.settings.login_failures_per_minute

    allowance = await limiter.peek("login", address, failures)
    _announce(scope, allowance)
    if not allowance.allowed:
        count("rate_limited")
        raise _limited(allowance, "failed logins", "check the API key")
    given = key()
    try:
        identity = await runtime.keys.identify(given)
    except Unauthorized:
        _announce(scope, await limiter.hit("login", address, failures))
        count("unauthorized")
        raise
    except AuthUnavailable:
        count("unavailable")
        raise
    count("ok")
    return identity


async def count_request(scope: Scope, runtime: Runtime, identity: Identity) -> None:
    """Lets one request of a key in, or raises RateLimited."""
    scope["user"] = identity
    limit = runtime.settings.rate_limit_per_minute
    if identity.unlimited:
        _set_headers(scope, limit, limit, 0)
        return
    allowance = await runtime.limiter.hit("key", identity.key_id, limit)
    _announce(scope, allowance)
    if not allowance.allowed:
        raise _limited(allowance, "requests", "slow down")


def _bearer(headers: Headers) -> str:
    given = headers.getlist("authorization")
    scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    key = key.strip()
    if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY:
        raise Unauthorized("send the API key as `Authorization: Bearer ws_sk_…`; `warmstart keys create` makes one")
    return key


def _announce(scope: Scope, allowance: Allowance) -> None:
    _set_headers(scope, allowance.limit, allowance.remaining, allowance.reset_s)


def _set_headers(scope: Scope, limit: int, remaining: int, reset_s: int) -> None:
    scope[ANSWER_HEADERS].update(
        {
            "RateLimit-Limit": str(limit),
            "RateLimit-Remaining": str(remaining),
            "RateLimit-Reset": str(reset_s),
        }
    )


def _limited(allowance: Allowance, what: str, advice: str) -> RateLimited:
    wait = max(allowance.reset_s, 1)
    return RateLimited(
        f"more than {allowance.limit} {what} a minute; {advice} and try again in {wait} s", retry_after=wait
    )


def parse_address(text: Any) -> IPAddress | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _canonical(name: str) -> str:
    return str(parse_address(name) or name.lower().rstrip("."))


def _host_name(authority: str) -> str | None:
    match = _HOST.fullmatch(authority.strip())
    return _canonical(match[1] or match[2]) if match else None


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
