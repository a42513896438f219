"""search, context."""

from __future__ import annotations

from typing import Any

import click

from warmstart.cli import output
from warmstart.cli.connection import run
from warmstart.memory import MEMORY_TYPES, ContextRequest, Hit, SearchRequest, SearchResult, parse


@click.command()
@click.argument("words", metavar="QUERY", nargs=-1, required=True)
@click.option("-n", "--namespace", help="Only this one (code-*: all that begin so); all where not given.")
@click.option("--type", "type", type=click.Choice(MEMORY_TYPES), multiple=True, help="May be given several times.")
@click.option("--tag", "tags", multiple=True, help="May be given several times; all must be there.")
@click.option("--entity", "entities", multiple=True, help="May be given several times; all must be there.")
@click.option("--source", help="Only of this source.")
@click.option("--min-importance", type=float, help="0 to 1.")
@click.option("--occurred-from", metavar="TIME", help="ISO 8601, inclusive.")
@click.option("--occurred-to", metavar="TIME", help="ISO 8601, exclusive.")
@click.option("--limit", type=int, help="1 to 50; 10 where not given.")
@click.option("--min-score", type=float, help="Scores lie between 0.00909 and 0.03279.")
@output.json_option
def search(words: tuple[str, ...], as_json: bool, **filters: Any) -> None:
    """Search by meaning and by words."""
    request = parse(SearchRequest, {"query": " ".join(words)} | _given(filters))
    result = run(lambda memory: memory.search(request))
    if as_json:
        output.print_json(result)
    else:
        _show(result)


@click.command()
@click.argument("words", metavar="QUERY", nargs=-1, required=True)
@click.option("-n", "--namespace", help="Only this one (code-*: all that begin so); all where not given.")
@click.option("--token-budget", type=int, help="Most tokens, 1 to 4000; 1500 where not given.")
@click.option("--budget-ms", type=int, help="Most time; 500 where not given.")
@click.option("--conversation", "conversation_id", help="Don't give again what this conversation had.")
@output.json_option
def context(words: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Print a block of what the memory knows, ready for a prompt."""
    request = parse(ContextRequest, {"query": " ".join(words)} | _given(options))
    result = run(lambda memory: memory.context(request))
    if as_json:
        output.print_json(result)
    elif result.context:
        click.echo(output.safe(result.context))


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """What was given, with the types that the requests have."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in options.items()
        if value not in (None, ())
    }


def _show(result: SearchResult) -> None:
    degraded = f", degraded: {', '.join(result.degraded)}" if result.degraded else ""
    hits = f"{len(result.hits)} hit{'' if len(result.hits) == 1 else 's'}"
    click.echo(f"{hits} ({result.mode}{degraded}, {result.took_ms:.0f} ms)", err=True)
    for number, hit in enumerate(result.hits, 1):
        click.echo(f"{number}. {output.heading(hit.title)}  {_score(hit)}")
        click.echo(f"   {hit.id}  {hit.namespace}  {hit.type}  {hit.occurred_at:%Y-%m-%d}")
        text = output.excerpt(hit.content)
        if text != hit.title:
            click.echo(f"   {output.safe(text)}")


def _score(hit: Hit) -> str:
    if hit.score is None:
        return "no score"
    arms = [f"{arm} {rank}" for arm, rank in (("vector", hit.ranks.vector), ("text", hit.ranks.text)) if rank]
    return f"{hit.score:.5f} ({', '.join(arms)})"
