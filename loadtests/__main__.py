"""Load tests: `make loadtest`, `make loadtest-gate`, `make loadtest-compare`."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import click
import httpx

from loadtests import compare as comparing
from loadtests import scenario as scenarios
from loadtests import slo, targets
from loadtests.data import SIZES
from loadtests.purge import PurgeFailed, purge
from loadtests.run import RESULTS, LoadFailed, Options, no_faults, run
from loadtests.seeding import SeedingFailed

#: An AssertionError is how the machinery of the container tests says that a command failed.
FAILURES = (SeedingFailed, LoadFailed, PurgeFailed, scenarios.ScenarioError, AssertionError, httpx.HTTPError)


def tell(line: str) -> None:
    click.echo(f"{datetime.now(UTC):%H:%M:%S} {line}", err=True)


@click.group()
def main() -> None:
    """Put a Warmstart server under load, and judge how it held."""


@contextmanager
def told() -> Iterator[None]:
    # whoever ends this wants the server ended and the memories purged, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except FAILURES as error:
        raise click.ClickException(str(error) or repr(error)) from None


@main.command(name="run")
@click.option("--scenario", "name", default="baseline", show_default=True, help="Of scenarios/, or a .toml file.")
@click.option("--url", default="", help="A server; without one, the stack in containers is started and ended.")
@click.option("--key", default="", envvar="KEY", help="Of an own tenant, made with --unlimited; several with commas.")
@click.option("--local", is_flag=True, help="In place of containers: `warmstart serve` on a home of its own.")
@click.option("--confirm-host", default="", help="Name the host again where it isn't this machine.")
@click.option(
    "--set", "settings", multiple=True, metavar="FIELD=NUMBER", help="memories, tenants or one of the shape's."
)
@click.option("--out", type=click.Path(path_type=Path), help=f"Folder of the report; default under {RESULTS.name}/.")
def run_(
    name: str, url: str, key: str, local: bool, confirm_host: str, settings: tuple[str, ...], out: Path | None
) -> None:
    """Run one scenario. Exit code 1 where a limit was missed or the run proved nothing."""
    with told():
        scenario = scenarios.load(name, [_setting(text) for text in settings])
        prefix = f"load-{secrets.token_hex(4)}"
        title = Path(name).stem
        folder = out or RESULTS / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{title}"
        options = Options(title, folder)
        if url:
            keys = [k.strip() for k in key.split(",") if k.strip()]
            with targets.given(url, keys, confirm_host, tell) as target:
                tell(f"run {prefix}; if it is killed: KEY=… python -m loadtests purge {prefix} --url {url}")
                result = run(scenario, target, prefix, options, tell)
        elif local:
            with targets.local(scenario.tenants, prefix) as target:
                result = run(scenario, target, prefix, options, tell, no_faults)
        else:
            from loadtests import containers

            with containers.target(scenario, prefix, tell) as target:
                result = run(scenario, target, prefix, options, tell, containers.broken)
    show(result.findings)
    tell(f"report: {folder / 'report.html'}")
    sys.exit(0 if result.ok else 1)


def _setting(text: str) -> tuple[str, float]:
    field, _, number = text.partition("=")
    try:
        return field, float(SIZES.get(number, number))
    except ValueError:
        raise click.BadParameter(f"{text!r} must be like rate=20 or memories=10k") from None


def show(findings: Sequence[slo.Finding]) -> None:
    for finding in findings:
        click.echo(str(finding))
    missed = slo.missed(findings)
    click.echo(f"{len(findings) - len(missed)} held, {len(missed)} missed")


@main.command()
def gate() -> None:
    """The short run of every change; see the README for how it judges on a noisy machine."""
    from loadtests.gate import judged

    with told():
        sys.exit(0 if judged(tell, show) else 1)


@main.command()
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
def compare(a: Path, b: Path) -> None:
    """Two reports of one scenario side by side. Exit code 1 where B is worse by more than noise."""
    try:
        rows = comparing.compare(comparing.read(a), comparing.read(b))
    except comparing.NotComparable as error:
        raise click.ClickException(str(error)) from None
    click.echo(comparing.table(rows))
    sys.exit(1 if any(row.worse for row in rows) else 0)


@main.command(name="purge")
@click.argument("prefix")
@click.option("--url", required=True)
@click.option("--key", required=True, envvar="KEY", help="The run's keys, with commas.")
@click.option("--confirm-host", default="")
def purge_(prefix: str, url: str, key: str, confirm_host: str) -> None:
    """Remove what a run that was killed left: PREFIX is what it said at its start, load-….

    For good, past the trash.
    """
    if not prefix.startswith("load-"):
        raise click.BadParameter("the prefix of a run begins with load-")
    with told(), targets.given(url, key.split(","), confirm_host, tell) as target, target.clients() as clients:
        click.echo(f"{purge(clients, prefix)} memories removed")


if __name__ == "__main__":
    os.environ.setdefault("WARMSTART_ALLOW_ROOT", "True")
    main()
