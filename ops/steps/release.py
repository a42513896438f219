"""The release's folder on the VM, and the secrets that it needs.

What has the content of a release that is there is that release: nothing is laid down.
"""

from __future__ import annotations

import json
import shlex
from typing import Any, Final

from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.operations import python

from ops import program, release, settings
from ops.facts import remote
from ops.inventory import given_secrets
from ops.runner import Deploy

RELEASES: Final = """: releases on the machine
cd /opt/warmstart 2>/dev/null || exit 0
for name in current current-tool; do echo "$(readlink $name)"; done
for manifest in releases/*/manifest.json; do test -f "$manifest" && tr -d '\\n' < "$manifest" && echo; done
true
"""
LAY_DOWN: Final = """
set -e
cd /opt/warmstart/releases
rm -rf .new-*
mkdir -m 755 .new-{id}
tar --extract --no-same-owner --directory .new-{id}
chmod -R u=rwX,go=rX .new-{id}
sync -f .new-{id}/manifest.json
mv -T .new-{id} {id}
"""
TOOL: Final = """
set -e
cd /opt/warmstart
ln -sfn releases/{id}/vm .current-tool.new
mv -T .current-tool.new current-tool
"""
LAY_DOWN_TIMEOUT_S: Final = 120
#: Of the secrets that go into secrets.env; the others are those of backups.
STACK_SECRETS: Final = (
    "REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD", "DATABASE_URL",
    "ALERT_WEBHOOK_TOKEN", "ALERT_SMTP_PASSWORD",
)  # fmt: skip


def apply(deploy: Deploy) -> None:
    current, tool, manifests = _there()
    made = deploy.release
    found = release.files(deploy.source, made.images, deploy.target)
    wanted = release.content_hash(found, made.images) if made.known else ""
    same = [m["release"] for m in manifests if wanted and m.get("content_hash") == wanted]
    if same:
        made.id = current if current in same else max(same)
        made.laid_down = True
    else:
        made.id = release.new_id(deploy.source)
        python.call(name=f"Lay down release {made.id}", function=_lay_down, deploy=deploy)
    if tool != f"releases/{made.id}/vm":
        python.call(name="The VM's program is this release's", function=_link_tool, deploy=deploy)
    _secrets(deploy)


def _there() -> tuple[str, str, list[dict[str, Any]]]:
    """The current release's id, where the tool's link points, and all manifests."""
    lines = remote(RELEASES).out.splitlines()
    if len(lines) < 2:
        return "", "", []
    return lines[0].rpartition("/")[2], lines[1], [json.loads(line) for line in lines[2:]]


def _lay_down(state: State, host: Host, deploy: Deploy) -> bool:
    # again, since the images' ids may be known only by now
    made = deploy.release
    found = release.files(deploy.source, made.images, deploy.target)
    about = release.manifest(made, deploy.source, deploy.target, found)
    made.laid_down = program.run(
        state, host, deploy, "sh", "-c", LAY_DOWN.format(id=made.id),
        stdin=release.archive(found, about), timeout_s=LAY_DOWN_TIMEOUT_S,
    )  # fmt: skip
    return bool(made.laid_down)


def _link_tool(state: State, host: Host, deploy: Deploy) -> bool:
    command = TOOL.format(id=deploy.release.id)
    return program.run(state, host, deploy, "sh", "-c", command, timeout_s=LAY_DOWN_TIMEOUT_S)


def _secrets(deploy: Deploy) -> None:
    given = {name: value for name, value in given_secrets(deploy.target).items() if name in STACK_SECRETS}
    wanted = json.dumps({"given": given, "must_be_given": settings.must_be_given(deploy.target)})
    pending = remote(shlex.join([program.VM_PROGRAM, "secrets", "--pending"]), stdin=wanted)
    if pending.ok and not pending.out.strip():
        return
    what = ", ".join(pending.out.split()) if pending.ok else "those that are missing"
    python.call(name=f"Secrets on the VM: {what}", function=_write_secrets, deploy=deploy, wanted=wanted)


def _write_secrets(state: State, host: Host, deploy: Deploy, wanted: str) -> bool:
    # by standard input: a command line is for everybody there to read
    return program.run(
        state, host, deploy, program.VM_PROGRAM, "secrets", stdin=wanted.encode(), timeout_s=LAY_DOWN_TIMEOUT_S
    )
