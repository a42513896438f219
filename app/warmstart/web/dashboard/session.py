"""Who is signed in: a signed cookie that names an API key by its hash, checked by the key ring at every request.

The cookie holds no key and nothing to keep on the server, so that a second process knows it too, and a revoked key
ends its sessions as it ends its requests.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from itsdangerous import BadData, URLSafeSerializer, URLSafeTimedSerializer
from starlette.requests import Request
from starlette.responses import Response

from warmstart.errors import Unauthorized

if TYPE_CHECKING:
    from warmstart.keys import Identity

log = structlog.get_logger(__name__)

#: Seconds after which somebody signs in anew.
SESSION_S: Final = 7 * 86_400
#: In the home, which all processes of an API share; without it sessions end with their process.
SECRET_FILE: Final = "session-secret"  # noqa: S105 - a name
SECRET_BYTES: Final = 32
COOKIE: Final = "warmstart"
NOTICE_COOKIE: Final = "warmstart-notice"
#: Cookies are bounded by browsers at 4,096 bytes: of so many ids a notice can offer to undo what was done.
MAX_NOTICE_IDS: Final = 50


@dataclass(frozen=True, slots=True)
class Session:
    identity: Identity
    #: What each form of this session carries.
    token: str = field(default_factory=lambda: secrets.token_urlsafe(18))


@dataclass(frozen=True, slots=True)
class Notice:
    """What was done, told on the next page; `undo` are ids that can be restored."""

    text: str
    undo: tuple[str, ...] = ()


class Sessions:
    def __init__(self, home: Path) -> None:
        self._path = home / SECRET_FILE
        self._secret: str | None = None

    async def keep(self, response: Response, session: Session, key_hash: str, *, secure: bool) -> None:
        """Makes the visitor's browser bring `session` from now on."""
        value = (await self._timed()).dumps([key_hash, session.token])
        _set_cookie(response, _name(COOKIE, secure), value, SESSION_S, secure=secure)

    async def open(self, request: Request, *, secure: bool) -> Session:
        """The session of a request; Unauthorized without a valid one, AuthUnavailable where that can't be said."""
        try:
            key_hash, token = (await self._timed()).loads(
                request.cookies.get(_name(COOKIE, secure), ""), max_age=SESSION_S
            )
        except (BadData, ValueError, TypeError):
            raise Unauthorized("sign in with an API key") from None
        return Session(await request.scope["state"]["runtime"].keys.identify_hash(str(key_hash)), str(token))

    def end(self, response: Response, *, secure: bool) -> None:
        for name in (COOKIE, NOTICE_COOKIE):
            response.delete_cookie(_name(name, secure), secure=secure, httponly=True, samesite="lax")

    # -- what the next page tells

    async def tell(self, response: Response, notice: Notice, *, secure: bool) -> None:
        value = (await self._plain()).dumps([notice.text, list(notice.undo[:MAX_NOTICE_IDS])])
        _set_cookie(response, _name(NOTICE_COOKIE, secure), value, 60, secure=secure)

    async def told(self, request: Request, *, secure: bool) -> Notice | None:
        given = request.cookies.get(_name(NOTICE_COOKIE, secure))
        if given is None:
            return None
        try:
            text, undo = (await self._plain()).loads(given)
            return Notice(text, tuple(undo))
        except (BadData, ValueError, TypeError):
            return None

    def forget(self, response: Response, *, secure: bool) -> None:
        response.delete_cookie(_name(NOTICE_COOKIE, secure), secure=secure, httponly=True, samesite="lax")

    async def _timed(self) -> URLSafeTimedSerializer:
        return URLSafeTimedSerializer(await self._key(), salt="session")

    async def _plain(self) -> URLSafeSerializer:
        return URLSafeSerializer(await self._key(), salt="notice")

    async def _key(self) -> str:
        if self._secret is None:
            try:
                self._secret = await asyncio.to_thread(shared_secret, self._path)
            except OSError as error:
                log.warning("dashboard.secret.unusable", path=str(self._path), reason=str(error))
                self._secret = self._secret or secrets.token_hex(SECRET_BYTES)
        return self._secret


def shared_secret(path: Path) -> str:
    """The secret of the file, made where there is none; of processes that make it at once, one wins."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(SECRET_BYTES))
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)
    secret = path.read_text().strip()
    if len(secret) < SECRET_BYTES:
        raise OSError(f"{path} holds no secret: remove it, and a new one is made")
    return secret


def _name(name: str, secure: bool) -> str:
    """Over TLS the prefix makes browsers refuse such a cookie from another host or over plain HTTP."""
    return f"__Host-{name}" if secure else name


def _set_cookie(response: Response, name: str, value: str, max_age: int, *, secure: bool) -> None:
    response.set_cookie(name, value, max_age=max_age, path="/", secure=secure, httponly=True, samesite="lax")
