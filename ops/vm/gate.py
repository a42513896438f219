"""When a container is ready, and when an api is fit for traffic; each wait is bounded, and ends early where it can."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Callable
from typing import Any, Final

from .changes import newest
from .stack import PATIENCE, Container, Release, Stack, VmError

#: A container that does not pass its own health check by then has failed.
GATE_TIMEOUT_S: Final = 90.0 * PATIENCE
PROBE_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.5
#: For the embedding server to load its model, or for the api to find its cache again. The smoke test then decides.
WARM_UP_S: Final = 60.0 * PATIENCE
SMOKE_ATTEMPTS: Final = 3
SMOKE_PAUSE_S: Final = 2.0
API_PORT: Final = 8484
#: A test of a release by its use: at that address, None for the public one. Raises where it does not work.
Smoke = Callable[[Stack, Release, str | None], None]


class Failed(VmError):
    """With the container whose last words tell more."""

    def __init__(self, reason: str, container: Container | None = None) -> None:
        super().__init__(reason)
        self.container = container


class Signals:
    """Heard at safe points only, so that Docker is never left half way; and not while something is undone."""

    def __init__(self) -> None:
        self.deaf = False
        self._received = ""

    def install(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: Any) -> None:
        self._received = signal.Signals(number).name

    def check(self) -> None:
        if self._received and not self.deaf:
            raise Failed(f"stopped by {self._received}")


class Gate:
    def __init__(self, stack: Stack, signals: Signals) -> None:
        self.stack, self.signals = stack, signals

    def wait_ready(self, container_id: str, restarts: int = 0) -> None:
        """Until its own health check passes, asked from here: Docker's first look at it is only after an interval."""
        deadline = time.monotonic() + GATE_TIMEOUT_S
        reason = ""
        while True:
            asked = time.monotonic()
            found = self.stack.inspect(container_id)
            if found is None:
                raise Failed(f"container {container_id[:12]} went away while it was to become ready")
            if found.state in ("exited", "dead", "restarting") or found.restarts > restarts:
                # of one that Docker has started again the exit code is gone
                code = "" if found.running else f": exit code {found.exit_code}"
                raise Failed(f"{found.service} does not stay up{code}", found)
            if found.running:
                if not found.probe:
                    return
                try:
                    self.stack.run(["docker", "exec", container_id, *found.probe], timeout_s=PROBE_TIMEOUT_S)
                    return
                except VmError as error:
                    reason = str(error).splitlines()[-1]
            if time.monotonic() > deadline:
                raise Failed(f"{found.service} is not ready after {GATE_TIMEOUT_S:.0f} s: {reason}", found)
            self.signals.check()
            # a probe is a program that starts: at most half of the time, for the machine has requests to serve
            time.sleep(max(POLL_S, time.monotonic() - asked))

    def smoke(self, test: Smoke, release: Release, slot: str, base: str | None) -> None:
        """It may fail while something still settles; an api that dies meanwhile has failed at once."""
        container = newest(self.stack.containers(slot)).get(slot)
        if container is None:
            raise Failed(f"{slot} went away")
        deadline = time.monotonic() + WARM_UP_S
        while not _says_ok(container) and time.monotonic() < deadline:
            self._check_alive(container)
            time.sleep(POLL_S)
        for attempt in range(1, SMOKE_ATTEMPTS + 1):
            self._check_alive(container)
            try:
                test(self.stack, release, base)
                return
            except Exception as error:  # whatever it is, the new api must not stay
                if attempt == SMOKE_ATTEMPTS:
                    raise Failed(f"smoke test of {base or 'the public URL'}: {error}", container) from error
                time.sleep(SMOKE_PAUSE_S)

    def _check_alive(self, container: Container) -> None:
        self.signals.check()
        now = self.stack.inspect(container.id)
        if now is None or not now.running or now.restarts > container.restarts:
            raise Failed(f"{container.service} ended by itself", now)


def _says_ok(container: Container) -> bool:
    """Whether the api itself finds nothing degraded."""
    if not (address := container.addresses.get("backend")):
        return False
    connection = http.client.HTTPConnection(address, API_PORT, timeout=PROBE_TIMEOUT_S * PATIENCE)
    try:
        connection.request("GET", "/readyz", headers={"Host": "127.0.0.1"})
        return bool(json.loads(connection.getresponse().read()).get("status") == "ok")
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
