"""Folders, settings, the VM's program by name, and the embedding model.

Containers run as numbers that are nobody's here, so no accounts are made.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from pyinfra import logger
from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.operations import files, python

from ops import model, settings
from ops.facts import remote
from ops.files import written
from ops.program import VM_PROGRAM
from ops.release import Release
from ops.runner import Deploy, Refused

FOLDERS: Final = {
    "/opt/warmstart": "755",
    "/opt/warmstart/releases": "755",
    "/opt/warmstart/config": "755",
    "/etc/warmstart": "700",
    "/var/lib/warmstart": "755",
    model.FOLDER: "755",
}
WRAPPER: Final = """#!/bin/sh
# Written by make deploy. The newest release's program, also for those before it.
exec python3 /opt/warmstart/current-tool "$@"
"""


def apply(deploy: Deploy) -> None:
    wanted = _model(deploy)
    text = settings.text(deploy.target, deploy.source.root, wanted.folder)
    deploy.release = Release(config_hash=hashlib.sha256(text.encode()).hexdigest())
    for path, mode in FOLDERS.items():
        files.directory(name=f"Folder {path}", path=path, mode=mode, user="root", group="root")
    written(name="The program of the VM", path=VM_PROGRAM, text=WRAPPER, mode="755")
    written(name="Settings of the stack", path=settings.FILE, text=text, mode="600")
    if remote(f"test -d {wanted.folder} && echo yes || echo no").out.strip() != "yes":
        verb = "Carry" if wanted.source else "Fetch"
        python.call(
            name=f"{verb} the embedding model to {wanted.folder}", function=_bring, deploy=deploy, wanted=wanted
        )


def _model(deploy: Deploy) -> model.Model:
    pinned = model.pinned(deploy.source.root)
    if deploy.target.model == "fetch":
        return pinned
    try:
        found = model.of_folder(Path(deploy.target.model).expanduser())
    except model.ModelError as error:
        raise Refused([str(error)]) from None
    if not deploy.target.settings.get("EMBED_MODEL") and not pinned.checksums.items() <= found.checksums.items():
        deploy.notes.append(
            f"The model in {deploy.target.model} is not {model.NAME} at {model.REVISION[:7]}, by compose/model.sha256."
        )
    return found


def _bring(state: State, host: Host, deploy: Deploy, wanted: model.Model) -> bool:
    ok, last = (model.carry if wanted.source else model.fetch)(deploy, wanted)
    if not ok:
        logger.error("\n".join(last))
    return ok
