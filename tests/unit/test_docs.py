"""The pages say what is so: links, targets and commands that they name exist, and generated ones are up to date."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Final

import jsonschema
import pytest

from docs.generate import EXAMPLES, OTHER_VARIABLES, pages
from warmstart.cli import COMMANDS
from warmstart.config import Settings
from warmstart.mcp_server.tools import TOOLS
from warmstart.memory import parse

ROOT: Final = Path(__file__).parents[2]
MIB: Final = 1024 * 1024


def files() -> list[Path]:
    """What is in git, and what would be with `git add --all`; without links and binary files."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "-C",
        ROOT,
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    found = [ROOT / name for name in names if name]
    return [path for path in found if path.is_file() and not path.is_symlink() and b"\0" not in path.read_bytes()]


FILES: Final = files()
#: By people, not by tools.
WRITTEN: Final = [path for path in FILES if not path.name.endswith((".lock", "package-lock.json"))]
PAGES: Final = [path for path in FILES if path.suffix == ".md"]


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def slug(heading: str) -> str:
    """The anchor that forges make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def prose(text: str) -> str:
    """`text` without what stands in code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.exists(), f"{target}: there is no {found}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(found.read_text()), re.MULTILINE)
            assert anchor in [slug(heading) for heading in headings], f"{target}: no such heading"


#: By the Makefile.
INCLUDED = ("compose/targets.mk", "ops/targets.mk", "tests/vm/targets.mk")


def makefile_targets() -> set[str]:
    rules = "".join((ROOT / name).read_text() for name in ("Makefile", *INCLUDED))
    return set(re.findall(r"^([a-z][a-z-]*):", rules, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_make_targets_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    code = "\n".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL) + re.findall(r"`([^`\n]+)`", text))
    # settings may stand before and between: `make LOCAL=1 up`
    targets = re.findall(r"(?:^|[\s;&(])make(?: [A-Z_]+=\S+)* ([a-z][a-z-]*)", code, re.MULTILINE)
    assert set(targets) <= makefile_targets()
    commands = re.findall(r"(?:^|[\s;&(/])warmstart ([a-z][a-z-]*)(?=\s|$)", code, re.MULTILINE)
    assert set(commands) <= set(COMMANDS)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_generated_pages_are_up_to_date(path: Path) -> None:
    assert path.read_text() == pages()[path], f"run `make docs`, and keep what it writes to {path.name}"


def test_every_setting_has_a_line() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    named = re.findall(r"^\| `([A-Z_0-9]+)` \|", page, re.MULTILINE)
    assert named == [name.upper() for name in Settings.model_fields] + list(OTHER_VARIABLES)
    source = "".join(path.read_text() for path in (ROOT / "app" / "warmstart").rglob("*.py"))
    assert set(re.findall(r"\bWARMSTART_[A-Z_]+\b", source)) <= set(named)
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize("name", TOOLS)
def test_examples_are_valid(name: str) -> None:
    arguments, answer = EXAMPLES[name]
    listed = TOOLS[name].listed()
    jsonschema.validate(arguments, listed.input_schema)
    jsonschema.validate(answer.structured.model_dump(mode="json", exclude_none=True), listed.output_schema or {})
    parse(TOOLS[name].arguments, arguments)


# -- what must not stand in any file


def found_in(pattern: str, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for path in paths
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_no_host_of_a_package_registry() -> None:
    # written so that it does not find itself
    hosts = r"py[p]i\.org|py[p]i\.python|python[h]osted\.org|npm[j]s\.(org|com)|yarn[p]kg\.com|[d]ebian\.(org|net)"
    assert found_in(hosts, FILES) == []


def test_no_path_of_one_machine() -> None:
    assert found_in(r"(?<![\w.~})/-])/(work|farm|home/[a-z]+|Users)/", WRITTEN) == []


def test_nothing_is_left_for_later() -> None:
    assert found_in(r"\b(TO[D]O|FIX[M]E|XX[X])\b|pytest\.sk[i]p\(|mark\.(sk[i]p|xfa[i]l)", WRITTEN) == []


def test_no_file_is_large() -> None:
    assert [str(path.relative_to(ROOT)) for path in FILES if path.stat().st_size > MIB] == []
