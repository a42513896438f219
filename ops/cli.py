"""What the operator calls: `make deploy` and the targets beside it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ops import ssh
from ops.inventory import InventoryError, Target, load
from ops.source import ROOT, SourceError, committed

if TYPE_CHECKING:
    from ops import runner

DEFAULT_INVENTORY: Final = Path("ops/inventories/prod.py")
#: Exit codes: 1 a step failed (and was undone), 2 refused: nothing was done.
FAILED: Final = 1
REFUSED: Final = 2
VM_PROGRAM: Final = "warmstart-vm"
#: Of no meaning to a migration, which embeds nothing; the deploy lays down the model.
MODEL_DIR: Final = "/var/lib/warmstart/model"


class Failure(click.ClickException):
    def __init__(self, message: str, exit_code: int = FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc] # click's own way


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "-i", "--inventory", type=click.Path(path_type=Path), default=DEFAULT_INVENTORY, envvar="INVENTORY",
    show_default=True, help="The file that says what VM.",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context, inventory: Path) -> None:
    """Deploy the memory to one VM, and run it there."""
    if "--help" in sys.argv or "-h" in sys.argv:
        return
    try:
        ctx.obj = load(inventory)
    except InventoryError as error:
        raise Failure(str(error), REFUSED) from None


# -- deploy and plan


@main.command()
@click.option("--break-lock", is_flag=True, help="Take over the lock of a deploy that is no more.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.pass_obj
def deploy(target: Target, break_lock: bool, as_json: bool) -> None:
    """Bring the VM to this commit; where it is there already, nothing is changed."""
    done, seconds = _run(target, dry=False, break_lock=break_lock)
    _print_changes(done.changes, "changed")
    _print_times(done.seconds, seconds)
    for note in done.notes:
        click.echo(note)
    click.echo(f"\n{target.url}/readyz answers. " + ("" if done.changes else "Nothing had to be changed."))
    if as_json:
        click.echo(json.dumps({"url": target.url, "total_seconds": round(seconds, 1), **done.record}))


@main.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object as the last line.")
@click.pass_obj
def plan(target: Target, as_json: bool) -> None:
    """Say what a deploy would change; never a secret's value, and nothing is done."""
    done, _ = _run(target, dry=True)
    click.echo(f"{len(done.changes)} changes" if done.changes else "Nothing would be changed.")
    if as_json:
        click.echo(json.dumps(done.record))


def _run(target: Target, *, dry: bool, break_lock: bool = False) -> tuple[runner.Deploy, float]:
    from ops import runner  # pyinfra takes a second to import, and all others need none of it

    began = time.monotonic()
    try:
        made = runner.Deploy(target, committed(), dry=dry, break_lock=break_lock, say=_say)
    except SourceError as error:
        raise Failure(str(error), REFUSED) from None
    try:
        runner.run(made)
    except runner.Refused as error:
        raise Failure(f"refused:\n{error}", REFUSED) from None
    except runner.DeployError as error:
        if made.changes:
            _print_changes(made.changes, "changed before that")
        raise Failure(str(error)) from None
    return made, time.monotonic() - began


def _say(line: str) -> None:
    """At once, also into a file or a pipe: who waits wants to see what for."""
    bold = not line.startswith(" ")
    click.secho(line, bold=bold)
    sys.stdout.flush()


def _print_changes(changes: list[runner.Change], word: str) -> None:
    if changes:
        click.echo(f"\n{len(changes)} {word}:")
    for change in changes:
        click.echo(f"  {change.step:<10} {change.operation}  ({change.seconds:.1f} s)")


def _print_times(steps: dict[str, float], total: float) -> None:
    click.echo("\n" + ", ".join(f"{name} {seconds:.1f}" for name, seconds in steps.items()))
    click.echo(f"{total:.1f} s in all")


# -- what the program on the VM does


def _on_vm(target: Target, *words: str, stdin: bytes | None = None, tty: bool = False) -> None:
    """Runs it with this terminal, and ends as it ended."""
    command = ssh.command(target, *words, tty=tty)
    try:
        done = subprocess.run(command, input=stdin)
    except KeyboardInterrupt:
        sys.exit(130)
    if done.returncode == 255:
        raise Failure(f"no SSH connection to {target.ssh_user}@{target.host}:{target.ssh_port}", REFUSED)
    sys.exit(done.returncode)


def _vm_command(name: str, words: tuple[str, ...], summary: str) -> Callable[..., None]:
    @main.command(name, context_settings={"ignore_unknown_options": True}, help=summary)
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    @click.pass_obj
    def run(target: Target, arguments: tuple[str, ...]) -> None:
        _on_vm(target, VM_PROGRAM, *words, *arguments)

    return run


_vm_command("status", ("status",), "What runs, since when, and how it is (--json).")
_vm_command("backup", ("backup",), "Take a backup now.")
_vm_command("drill", ("drill",), "Restore the newest backup into a scratch place, and look whether it is whole.")
_vm_command("restart", ("restart",), "Start a service's container anew (SERVICE), and wait until it is ready.")
_vm_command("smoke", ("smoke",), "Try the memory as a client does: save, search, MCP, delete.")
_vm_command("warmstart", ("warmstart",), "A command of the memory's own program, such as `tenants list`.")
_vm_command("rollback", ("rollback",), "Go back to the release before.")
_vm_command("rotate-secrets", ("secrets", "rotate"), "Make new secrets (of those named), and bring them into use.")


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--repository", help="A restic repository elsewhere; its password is asked for.")
@click.pass_obj
def restore(target: Target, arguments: tuple[str, ...], repository: str | None) -> None:
    """Bring the newest backup (or --snapshot ID) back; live data is replaced only with --replace HOST."""
    if not repository:
        _on_vm(target, VM_PROGRAM, "restore", *arguments)
    password = (
        click.prompt("Password of the repository", hide_input=True) if sys.stdin.isatty() else sys.stdin.readline()
    )
    secret = json.dumps({"RESTIC_PASSWORD": str(password).rstrip("\n")}).encode()
    _on_vm(target, VM_PROGRAM, "restore", "--repository", str(repository), *arguments, stdin=secret)


@main.command()
@click.argument("service", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on as lines come.")
@click.option("-n", "--lines", default=200, show_default=True)
@click.pass_obj
def logs(target: Target, service: str | None, follow: bool, lines: int) -> None:
    """The containers' logs (of one SERVICE)."""
    words = [f"--lines={lines}", *(["--follow"] if follow else []), *([service] if service else [])]
    _on_vm(target, VM_PROGRAM, "logs", *words)


@main.command(name="ssh")
@click.pass_obj
def ssh_(target: Target) -> None:
    """A shell on the VM."""
    _on_vm(target, tty=True)


@main.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def exec_(target: Target, words: tuple[str, ...]) -> None:
    """Run a command on the VM, as root."""
    _on_vm(target, *words)


@main.command(name="migrate-dimension", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def migrate_dimension(target: Target, arguments: tuple[str, ...]) -> None:
    """The vectors to the model of the inventory's settings, before the deploy of these (--plan, --rollback)."""
    from ops import runner, settings

    try:
        text = settings.text(target, ROOT, MODEL_DIR)
    except runner.Refused as error:
        raise Failure(f"refused:\n{error}", REFUSED) from None
    _on_vm(target, VM_PROGRAM, "migrate-dimension", *arguments, stdin=text.encode())


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def keys(target: Target, words: tuple[str, ...]) -> None:
    """API keys: list, create NAME, revoke ID …, as `warmstart keys` knows them."""
    _on_vm(target, VM_PROGRAM, "keys", *(words or ("list",)))


@main.command()
@click.option("--confirm", metavar="HOST", help="The host's name, for programs; a person is asked.")
@click.option("--backups", is_flag=True, help="The backups on the VM as well.")
@click.pass_obj
def destroy(target: Target, confirm: str | None, backups: bool) -> None:
    """Remove the memory and all its data from the VM."""
    if confirm is None and sys.stdin.isatty():
        confirm = click.prompt(f"All memories on {target.host} will be gone. Type the host's name to go on", default="")
    if confirm != target.host:
        raise Failure(f"not confirmed: nothing was done. Give the host's name, {target.host}", REFUSED)
    _on_vm(target, VM_PROGRAM, "destroy", "--confirm", target.host, *(["--backups"] if backups else []))
