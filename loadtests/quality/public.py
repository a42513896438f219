"""Retrieval on texts that nobody wrote for it: documentation of Python's own library, translations of Django.

    python -m loadtests.quality.public [--json] [--misses]

docstrings     a function's name and parameters; its docstring is to be found among those of others of the library
translations   a message of Django in English; its translation is to be found among those of others, each in one of
               the languages; Django's catalogs are fetched with pip
"""

from __future__ import annotations

import ast
import asyncio
import gettext
import io
import random
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import click

from loadtests.quality.__main__ import Asked, answers, show
from warmstart.logs import configure

DJANGO: Final = "Django==5.2.8"
#: Scripts that share no letter, and one that does.
LANGUAGES: Final = ("de", "ja", "zh_Hans", "ru")
#: Of each set.
COUNT: Final = 200
SEED: Final = 1
#: Shorter ones say nothing, longer ones are pages.
DOCSTRING_CHARS: Final = range(80, 2_000)
MESSAGE_WORDS: Final = range(5, 60)

Set = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def docstrings() -> Set:
    """Of the library of the interpreter that runs this."""
    library = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "idlelib", "site-packages", "dist-packages", "lib2to3", "pydoc_data"}
    found: dict[str, str] = {}
    for file in sorted(library.rglob("*.py")):
        if left_out.isdisjoint(file.relative_to(library).parts):
            for asked, said in _functions(ast.parse(file.read_bytes())):
                found.setdefault(said, asked)
    # a name that several have asks for none of them
    named = list(found.values())
    some = [(asked, said, "docstring") for said, asked in found.items() if named.count(asked) == 1]
    return _set(random.Random(SEED).sample(some, COUNT))


def _functions(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            said = ast.get_docstring(node)
            if said and len(said) in DOCSTRING_CHARS:
                parameters = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")]
                yield f"{node.name}({', '.join(parameters)})", said


def translations(folder: Path) -> Set:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", DJANGO]
    subprocess.run(command, cwd=folder, check=True)
    [wheel] = folder.glob("*.whl")
    catalogs: dict[str, dict[str, str]] = {language: {} for language in LANGUAGES}
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            parts = Path(name).parts
            if name.endswith("/LC_MESSAGES/django.mo") and parts[-3] in catalogs:
                catalogs[parts[-3]] |= _messages(archive.read(name))
    common = sorted(set.intersection(*(set(c) for c in catalogs.values())))
    dice = random.Random(SEED)
    sentences = [message for message in common if len(message.split()) in MESSAGE_WORDS]
    some = dice.sample(sentences, min(COUNT, len(sentences)))
    return _set([(m, catalogs[language][m], language) for m, language in zip(some, cycle(LANGUAGES), strict=False)])


def _messages(compiled: bytes) -> dict[str, str]:
    catalog: dict[Any, str] = gettext.GNUTranslations(io.BytesIO(compiled))._catalog  # type: ignore[attr-defined]
    return {k: v for k, v in catalog.items() if isinstance(k, str) and k and v and k != v and "\x04" not in k}


def _set(some: list[tuple[str, str, str]]) -> Set:
    """Of questions, what answers them, and their kinds."""
    memories = [{"key": str(n), "content": said} for n, (_, said, _) in enumerate(some)]
    questions = [{"query": asked, "answer": str(n), "kind": kind} for n, (asked, _, kind) in enumerate(some)]
    return memories, questions


async def run() -> dict[str, list[Asked]]:
    with tempfile.TemporaryDirectory() as folder:
        sets = {"docstrings": docstrings(), "translations": translations(Path(folder))}
    found = {}
    for name, (memories, questions) in sets.items():
        found |= await answers(memories, {name: questions})
    return found


@click.command()
@click.option("--json", "program", is_flag=True, help="The figures as one JSON object.")
@click.option("--misses", is_flag=True, help="List the questions whose answer is not among the first five.")
def main(program: bool, misses: bool) -> None:
    """Measure retrieval on public texts."""
    configure("error", "console")
    show(asyncio.run(run()), program=program, misses=misses)


if __name__ == "__main__":
    main()
