"""Records what a real machine answers to a step's facts: python -m tests.unit.ops.record INVENTORY NAME STEP…

Nothing is changed on it. The answers are added to recorded/NAME.json; look through them before they are committed.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from gevent import monkey

monkey.patch_all()

from pyinfra.api.host import Host  # noqa: E402 - gevent goes first

from ops import runner  # noqa: E402
from ops.inventory import load  # noqa: E402
from ops.source import Source  # noqa: E402
from tests.unit.ops.steptest import RECORDED, Ran, collect, key  # noqa: E402


def main() -> None:
    inventory, name, *steps = sys.argv[1:]
    path = RECORDED / f"{name}.json"
    answers: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    deploy = runner.Deploy(load(Path(inventory)), Source(Path(), "c0ffee" + "0" * 34, "ann@laptop"), dry=True)
    send = Host.run_shell_command

    def recording(self: Host, command: Any, *args: Any, **kwargs: Any) -> Any:
        ok, output = send(self, command, *args, **kwargs)
        text = command if isinstance(command, str) else command.get_masked_value()
        # of /etc/os-release; addresses say nothing to a step
        lines = [line for line in output.stdout_lines if "_URL=" not in line]
        answers[key(text)] = lines if ok else {"stdout": lines, "stderr": output.stderr_lines, "success": False}
        return ok, output

    Host.run_shell_command = recording  # type: ignore[method-assign]
    with runner.connected(deploy.target) as (state, host):
        for step in steps:
            runner._forget_operations(state, host)
            try:
                importlib.import_module(f"ops.steps.{step}").apply(deploy)
            except runner.Refused as refused:
                print(f"{step} refused:\n{refused}")
            collect(state, host, ran := Ran())
            print(step, json.dumps(ran.operations, indent=1))
    path.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
