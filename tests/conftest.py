"""What all tests share: an environment in which no setting of the person who runs them reaches the code."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from typing import Final

import pytest
import structlog
from hypothesis import settings

from warmstart.config import Settings

# how long an example takes depends on who else is at work
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

#: Settings (and the files some are read from), and what libraries under them read by themselves.
NAMES: Final = {name.upper() + suffix for name in Settings.model_fields for suffix in ("", "_FILE")}
FAMILIES: Final = re.compile(r"WARMSTART_|OPENAI_|UPSTASH_|REDIS_|EMBED|LANCE|PG[A-Z]+$|CLAUDE|MCP_|(NO|FORCE)_COLOR$")


@pytest.fixture(scope="session", autouse=True)
def clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the whole session, so that it stands before any other fixture; a home of its own, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name in NAMES or FAMILIES.match(name)]:
            patch.delenv(name)
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(autouse=True)
def same_umask() -> Iterator[None]:
    """As it was before the test: commands that run inside of one narrow it for the whole process."""
    umask = os.umask(0o022)
    os.umask(umask)
    yield
    os.umask(umask)


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """As it was before the test: commands that run inside of one set it for the whole process."""
    root = logging.getLogger()
    level = root.level
    yield
    for handler in root.handlers[:]:
        if getattr(handler, "warmstart", False):
            root.removeHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()
