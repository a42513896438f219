"""The whole stack, once for all tests, in real containers. Where they can't start, tests fail: none is skipped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pytest_docker.plugin import get_docker_services

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "compose")]

import build  # noqa: E402
from stack import FILES, UP, Stack, prepared  # noqa: E402

PROJECT = "warmstart-test"
SMALL_PROJECT = "warmstart-small"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "containers: needs real containers; run by `make test-containers`")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.containers)


@pytest.fixture(scope="session")
def images() -> None:
    """Engine and images; seconds where both are there."""
    build.ensure_engine()
    build.build_images()


@pytest.fixture(scope="session")
def make_stack(images: None, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A stack that is not started yet; see `prepared`."""

    def make(project: str, edge: str, **settings: str) -> Stack:
        return prepared(tmp_path_factory.mktemp(project), project, edge, **settings)

    return make


@pytest.fixture(scope="session")
def stack(make_stack) -> Iterator[Stack]:  # type: ignore[no-untyped-def]
    made: Stack = make_stack(PROJECT, "172.30.85", LOGIN_FAILURES_PER_MINUTE="20", RATE_LIMIT_PER_MINUTE="6000")
    made.compose("down", "--volumes", "--remove-orphans")  # of a run that was killed
    files = [str(file) for file in FILES]
    try:
        with get_docker_services(made.shell_command, files, PROJECT, [UP], []):
            made.fetch_authority()
            yield made
    except BaseException:
        # pytest-docker starts before its own `try`: without this, a start that failed leaves no word and all containers
        show(made)
        raise
    finally:
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")


@pytest.fixture(scope="session")
def small_stack(make_stack) -> Iterator[Stack]:  # type: ignore[no-untyped-def]
    """Another one, with volumes that are soon full; what is done to it is no matter to tests of the first."""
    made: Stack = make_stack(SMALL_PROJECT, "172.30.86", RATE_LIMIT_PER_MINUTE="6000")
    made.files = (*FILES, HERE / "small.yml")
    made.compose("down", "--volumes", "--remove-orphans")
    try:
        made.compose(*UP.split())
        made.fetch_authority()
        yield made
    except BaseException:
        show(made)
        raise
    finally:
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "10")


@pytest.fixture(scope="session")
def small_key(small_stack: Stack) -> str:
    return small_stack.create_key()


def show(stack: Stack) -> None:
    for words in (["ps", "--all"], ["logs", "--no-color", "--tail", "60"]):
        try:
            print(stack.compose(*words), file=sys.stderr)
        except (AssertionError, subprocess.SubprocessError) as error:
            print(f"{words}: {error}", file=sys.stderr)


@pytest.fixture(scope="session")
def key(stack: Stack) -> str:
    stack.execute("api", "warmstart", "tenants", "create", "default")
    return stack.create_key()


@pytest.fixture
def https(stack: Stack, key: str) -> Iterator[httpx.Client]:
    """With the key, through caddy."""
    with stack.client(key) as client:
        yield client


@pytest.fixture(autouse=True)
def no_fault_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "stack" in request.fixturenames:
        stack: Stack = request.getfixturevalue("stack")
        stack.clear_fault()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """The containers' last words beside a failure."""
    report = yield
    if report.when == "call" and report.failed and "stack" in getattr(item, "fixturenames", ()):
        stack = item.funcargs.get("stack")  # type: ignore[attr-defined]
        if stack is not None:
            text = stack.compose("ps", "--all") + stack.compose("logs", "--no-color", "--tail", "25")
            report.sections.append(("containers", text))
    return report
