"""LanceDB without the client of remote catalogs that it imports: a thousand generated classes that nothing here calls.

They are half of the time that any process of ours takes to start, and 19 MB of its memory. Whoever asks for one
of their names gets an empty class.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Final

UNUSED: Final = "lance_namespace_urllib3_client"


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class _Unused(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == UNUSED or fullname.startswith(UNUSED + "."):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def without_remote_catalogs() -> None:
    """Before LanceDB is imported; a process that has it already keeps it as it is."""
    if UNUSED not in sys.modules:
        sys.meta_path.insert(0, _Unused())
