"""The load, in a process of its own (Locust patches the standard library): `python -m loadtests run` starts it.

One Locust user holds the plan. It starts a greenlet for each visit when the
visit is due, however many others still wait for an answer; so a server that
stands still meets all who would have come, and their waiting is measured.
"""

from __future__ import annotations

import os
import random
import ssl
import time
from pathlib import Path
from typing import Final, Protocol

import gevent
from gevent.pool import Pool
from locust import FastHttpUser, constant, task

from loadtests.data import Generator
from loadtests.plan import VARIABLE, Plan
from loadtests.users.abuser import Abuser
from loadtests.users.agent import Agent
from loadtests.users.caller import TIMEOUT_S, Caller, Record, Verdict
from loadtests.users.reader import Reader
from loadtests.users.rest import CommandLine, Hook, Indexer
from loadtests.users.world import World

#: Visits under way; one more is not sent, and counts as failed.
MAX_VISITS: Final = 1_000
CONNECTIONS: Final = 512
PLAN: Final = Plan.model_validate_json(Path(os.environ[VARIABLE]).read_bytes())


class User(Protocol):
    def visit(self, caller: Caller, due: float) -> None: ...


def tls() -> ssl.SSLContext:
    context: ssl.SSLContext = gevent.ssl.create_default_context(cadata=PLAN.authority or None)
    return context


class Load(FastHttpUser):
    host = PLAN.url
    wait_time = constant(0)
    insecure = False
    ssl_context_factory = staticmethod(tls)
    concurrency = CONNECTIONS
    network_timeout = TIMEOUT_S
    connection_timeout = TIMEOUT_S

    @task
    def follow_the_plan(self) -> None:
        world = World(
            PLAN.keys, Generator(f"{PLAN.scenario.seed}-load", PLAN.prefix, len(PLAN.keys)),
            random.Random(PLAN.scenario.seed), PLAN.limited_key,
        )  # fmt: skip
        users: dict[str, User] = {
            "agent": Agent(world), "hook": Hook(world), "cli": CommandLine(world), "indexer": Indexer(world),
            "reader": Reader(world), "abuser": Abuser(world),
        }  # fmt: skip
        visits = list(PLAN.visits())
        pool = Pool(MAX_VISITS)
        with PLAN.requests_file.open("w", newline="") as file:
            began = Caller.clock()
            PLAN.begun_file.write_text(str(time.time()))
            caller = Caller(self.client, Record(file), began)
            for second, kind in visits:
                due = began + second
                if (wait := due - Caller.clock()) > 0:
                    gevent.sleep(wait)
                if pool.full():
                    now = Caller.clock()
                    caller.note(kind, due, now, now, Verdict(False, 0, f"{MAX_VISITS} visits are under way"))
                else:
                    pool.spawn(visit, users[kind], kind, caller, due)
            gevent.sleep(max(0.0, began + PLAN.scenario.shape.seconds - Caller.clock()))
            pool.join(TIMEOUT_S + 5)
        self.environment.process_exit_code = 0
        self.environment.runner.quit()


def visit(user: User, kind: str, caller: Caller, due: float) -> None:
    """A fault of ours is a failed request: the run must not look better for it."""
    try:
        user.visit(caller, due)
    except Exception as error:
        now = Caller.clock()
        caller.note(kind, due, now, now, Verdict(False, 0, f"fault of the load itself: {error!r}"))
        raise
