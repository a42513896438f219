"""Roll-outs: the new api starts beside the old one, takes the traffic, and only then the old one goes.

What is to be done follows from what is there, so after a kill the same command carries on. What fails is undone: until
a roll-out has passed, the old api is running and is never touched.

SIGHUP is ignored: a roll-out whose connection is lost goes on to its end by itself, which takes no longer than its undo
would. SIGINT and SIGTERM undo it.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Final

from .changes import Wanted, before_the_api, image_ids, left_over, newest, pending, wanted
from .files import behind_their_files, lay_files, move_traffic, reload_caddy
from .gate import API_PORT, Failed, Gate, Signals, Smoke
from .progress import phase, say
from .stack import SLOTS, UP, Container, Refused, Release, Stack, VmError

MIGRATE_TIMEOUT_S: Final = 900.0
#: Of the app, those that change over when the new api has the traffic: each old one stops before its new one starts.
FOLLOWERS: Final = ("redis-rest", "worker")


class RollOut:
    """Of one release, under the stack's lock. `smoke` raises where the service does not work."""

    def __init__(self, stack: Stack, release: Release, signals: Signals, smoke: Smoke) -> None:
        self.stack, self.release, self.signals, self.smoke = stack, release, signals, smoke
        self.gate = Gate(stack, signals)
        self.old = stack.current()
        #: The slot of the new api, as soon as it is known.
        self.slot = ""

    # -- commands

    def services(self) -> None:
        """All but the app, and caddy's rules, as this release has them."""
        services = wanted(self.stack, self.release)
        names = before_the_api(services)
        try:
            with phase("services") as done:
                done += lay_files(self.stack, self.release)
                # the others first: caddy, where it is replaced, cuts connections
                for some in (names[:-1], names[-1:]):
                    done += self._converge(self.release, some, services)
                for container in behind_their_files(self.stack, names):
                    self.stack.run(["docker", "restart", container.id])
                    self.gate.wait_ready(container.id)
                    done.append(f"{container.service} started anew for its files")
                done += reload_caddy(self.stack)
        except VmError as error:
            self._fail(error, lambda: self._services_back(names))

    def migrate(self) -> None:
        image_ids(self.stack, self.release)
        with phase("migrate") as done:
            done += self.run_app("database", "migrate", timeout_s=MIGRATE_TIMEOUT_S).strip().splitlines()

    def run_app(self, *words: str, timeout_s: float) -> str:
        """One command of this release's image, beside whatever runs."""
        command = self.stack.compose(self.release, "run", "--rm", "--no-deps", "--no-TTY", SLOTS[0], *words)
        return self.stack.run(command, timeout_s=timeout_s)

    def rollout(self) -> None:
        services = wanted(self.stack, self.release)
        try:
            self._forward(services)
        except VmError as error:
            self._fail(error, self._back)

    def _fail(self, error: VmError, undo: Callable[[], None]) -> None:
        """Print why with the container's last words, undo, and raise with the outcome."""
        self.signals.deaf = True
        say(f"Failed: {error}")
        container = getattr(error, "container", None)
        if container is not None:
            say(f"The last lines of {container.name}:")
            with suppress(VmError):
                say("\n".join(f"  {line}" for line in self.stack.log(container).splitlines()))
        if self.old is None:
            raise VmError("this is the first release, so there is none to go back to: deploy again") from error
        try:
            undo()
        except VmError as second:
            raise VmError(f"the undo is not complete: {second}\nRoll out {self.old.id} to make it so.") from error
        raise VmError(f"undone: {self.old.id} serves") from error

    # -- forward

    def _forward(self, services: Mapping[str, Wanted]) -> None:
        self._new_api(services)
        with phase("redis-rest and worker") as done:
            done += self._converge(self.release, FOLLOWERS, services)
        with phase("public smoke") as done:
            self.gate.smoke(self.smoke, self.release, self.slot, None)
            done.append("passed")
        self.signals.check()
        with phase("what is over") as done:
            for name in left_over(services, newest(self.stack.containers()), self.slot):
                done += self._remove(name)
        self._link()

    def _new_api(self, services: Mapping[str, Wanted]) -> None:
        """The release's api runs, and has the traffic."""
        serving = self._recover()
        found = newest(self.stack.containers())
        there = found.get(serving)
        if not services[serving].difference(there):
            self.slot = serving
            return
        self.slot = slot = other(serving) if there is not None and there.running else serving
        with phase("new api") as done:
            # without it the first api would be degraded; where one runs, it changes over later
            rest = found.get(FOLLOWERS[0])
            if rest is None or not rest.running or rest.detached:
                done += self._converge(self.release, FOLLOWERS[:1], services)
            if slot in found and services[slot].difference(found[slot]):
                done += self._remove(slot)
            done += self._converge(self.release, [slot], services)
        with phase("inner smoke") as done:
            self.gate.smoke(self.smoke, self.release, slot, f"http://{slot}:{API_PORT}")
            done.append("passed")
        self.signals.check()
        if slot != serving:
            with phase("traffic") as done:
                done += move_traffic(self.stack, slot)

    def _recover(self) -> str:
        """The slot with the traffic, with an api in it again where there is one to be had."""
        serving = self.stack.serving()
        found = newest(self.stack.containers())
        mine, second = found.get(serving), found.get(other(serving))
        if mine is not None and mine.running:
            return serving
        if second is not None and second.running:
            with phase(f"{serving} does not run: traffic") as done:
                done += move_traffic(self.stack, second.service)
            return second.service
        if self.old is not None:
            with suppress(VmError), phase(f"{serving} does not run: old api") as done:
                # without it nothing is served until the new one is ready
                done += self._revive(self.old, serving, mine)
        return serving

    def _revive(self, release: Release, slot: str, dead: Container | None) -> list[str]:
        if dead is None:
            return self._converge(release, [slot], wanted(self.stack, release))
        # as it was: settings may have changed since
        self.stack.run(["docker", "start", dead.id])
        self.gate.wait_ready(dead.id)
        return [f"{slot} started again"]

    def _link(self) -> None:
        """From here on the release is the current one."""
        if self.old is None or self.old.id != self.release.id:
            if self.old is not None:
                self.stack.link("previous", self.old)
            self.stack.link("current", self.release)

    # -- back

    def _back(self) -> None:
        """Traffic to the old api, away with the new one, and the rest as the old release has it."""
        if self.old is None or not self.slot:
            return
        with phase("undo: traffic") as done:
            if self.slot == self.stack.serving():
                target = other(self.slot)
                there = newest(self.stack.containers(target)).get(target)
                if there is None or not there.running:
                    if self.old.id == self.release.id:
                        raise VmError(f"of {self.old.id} no other api is left to go back to")
                    done += self._revive(self.old, target, there)
                done += move_traffic(self.stack, target)
        with phase("undo: new api") as done:
            done += self._remove(self.slot)
        self._services_back([*before_the_api(wanted(self.stack, self.old)), *FOLLOWERS])

    def _services_back(self, names: Sequence[str]) -> None:
        """Those of `names` that the new release made, as the old one has them. All are tried."""
        if self.old is None or self.old.id == self.release.id:
            return
        faults = []
        services = wanted(self.stack, self.old)
        with phase("undo: services") as done:
            done += lay_files(self.stack, self.old)
            found = newest(self.stack.containers())
            for name in names:
                container = found.get(name)
                if name not in services or (container is not None and container.release != self.release.id):
                    continue
                try:
                    done += self._converge(self.old, [name], services)
                except VmError as error:
                    faults.append(f"{name}: {error}")
            done += reload_caddy(self.stack)
        if faults:
            raise VmError("; ".join(faults))

    # -- parts

    def _converge(self, release: Release, names: Sequence[str], services: Mapping[str, Wanted]) -> list[str]:
        """Those of `names` that differ run as `release` has them, and are ready. What was done, by service."""
        found = self.stack.containers()
        before, count = newest(found), Counter(container.service for container in found)
        reasons = {name: services[name].difference(before.get(name)) for name in names}
        # a recreation that was killed leaves the old one beside the new
        reasons |= {name: "twice there" for name in names if count[name] > 1 and not reasons[name]}
        changes = {name: reason for name, reason in reasons.items() if reason}
        if not changes:
            return []
        self.signals.check()
        if detached := [name for name in changes if (there := before.get(name)) and there.detached]:
            self.stack.run(self.stack.compose(release, *UP, "--force-recreate", *detached))
        self.stack.run(self.stack.compose(release, *UP, *changes))
        after = newest(self.stack.containers())
        done = []
        for name, reason in changes.items():
            old, new = before.get(name), after.get(name)
            if new is None:
                raise Failed(f"{name} is not there after its start")
            same = old is not None and old.id == new.id
            self.gate.wait_ready(new.id, new.restarts if same else 0)
            what = "started" if same else "made" if old is None else "replaced"
            done.append(f"{name} {what} ({reason})")
        return done

    def _remove(self, service: str) -> list[str]:
        """An api's requests under way end first: the grace period is the container's own."""
        found = self.stack.containers(service)
        for container in found:
            self.stack.run(["docker", "stop", container.id])
            self.stack.run(["docker", "rm", "--volumes", container.id])
        return [f"{service} removed"] if found else []


def other(slot: str) -> str:
    return SLOTS[slot == SLOTS[0]]


# -- the command line


def add_parser(subparsers: Any) -> None:
    for name, function, text in (
        ("services", _services, "bring up databases, embeddings and caddy as a release has them"),
        ("migrate", _migrate, "bring the database to a release's schema"),
        ("rollout", _rollout, "put a release in the place of the one that serves"),
        ("pending", _pending, "what these three would change"),
    ):
        parser: argparse.ArgumentParser = subparsers.add_parser(name, help=text)
        parser.add_argument("release")
        if name == "pending":
            parser.add_argument("--json", action="store_true", required=True)
        parser.set_defaults(run=function)
    subparsers.add_parser("rollback", help="go back to the release before").set_defaults(run=_rollback)


@contextmanager
def _locked(what: str, release_id: str | None) -> Iterator[RollOut]:
    """None: the previous release."""
    stack = Stack.from_environment()
    signals = Signals()
    signals.install()
    with stack.lock(what):
        release = stack.previous() if release_id is None else stack.release(release_id)
        current = stack.current()
        if release is None or (release_id is None and current is not None and release.id == current.id):
            raise Refused("there is no release before this one on the machine, so there is none to go back to")
        yield RollOut(stack, release, signals, _smoke)


def _smoke(stack: Stack, release: Release, base: str | None) -> None:
    from .smoke import run_smoke

    run_smoke(stack, release, base=base)


def _services(args: argparse.Namespace) -> int:
    with _locked("services", args.release) as run:
        run.services()
    return 0


def _migrate(args: argparse.Namespace) -> int:
    with _locked("migrate", args.release) as run:
        run.migrate()
    return 0


def _rollout(args: argparse.Namespace) -> int:
    with _locked("rollout", args.release) as run:
        if pending(run.stack, run.release).serves:
            say(f"{run.release.id} serves already: nothing to do")
        else:
            run.rollout()
    return 0


def _rollback(args: argparse.Namespace) -> int:
    with _locked("rollback", None) as run:
        image_ids(run.stack, run.release)
        with phase(f"database check by {run.release.id}") as done:
            try:
                run.run_app("database", "check", timeout_s=MIGRATE_TIMEOUT_S)
            except VmError as error:
                raise Refused(f"release {run.release.id} can't use the database as it is by now: {error}") from None
            done.append("passed")
        run.services()
        run.rollout()
    return 0


def _pending(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    print(json.dumps(asdict(pending(stack, stack.release(args.release)))))
    return 0
