"""`moeflow check`: the command."""

from __future__ import annotations

from pathlib import Path

import click
import httpx
import msgspec
from rich.console import Console

from moeflow.cli import lazy as late
from moeflow.cli.api_key import api_key_option
from moeflow.cli.check.outcome import Result
from moeflow.cli.check.report import junit, summary, table
from moeflow.cli.check.run import APIS, choose, open_server, run_checks
from moeflow.cli.progress import bar

EPILOG = """\b
Examples:
  moeflow check
      the server at http://127.0.0.1:8000
  moeflow check http://127.0.0.1:11434 --only tools --verbose
      each failure with a curl command that reproduces it
  moeflow check --api all --junit conformance.xml
      every API has to be there; results for a CI server

A server may lack an API, or refuse a feature with a clear error: the result is `absent`. Rules that an API promises
only as best effort end with `warning`."""

_FILE_WIDTH = 160


@click.command(epilog=EPILOG)
@click.argument("url", default="http://127.0.0.1:8000")
@click.option("--model", help="Its name.  [default: the first one that the server lists]")
@click.option(
    "--api",
    type=click.Choice(APIS),
    default=APIS[0],
    show_default=True,
    help="Check this API, and fail if it is absent. any: every API that the server has.",
)
@click.option("--only", metavar="PATTERN", default="*", help="Area, or pattern of names, such as 'chat.stream_*'.")
@click.option("--list", "lists", is_flag=True, help="Print the checks and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a check instead of a table.")
@click.option(
    "--junit", "junit_file", type=click.Path(dir_okay=False, path_type=Path), help="Write results as JUnit XML."
)
@click.option("--timeout", "timeout_s", type=click.FloatRange(0, min_open=True), default=120.0, show_default=True,
              help="Longest wait for a server's next bytes, in seconds.")  # fmt: skip
@click.option("--verbose", is_flag=True, help="Print a curl command for each failure.")
@api_key_option("The server's key.")
def check(
    url: str,
    model: str | None,
    api: str,
    only: str,
    lists: bool,
    as_json: bool,
    junit_file: Path | None,
    timeout_s: float,
    verbose: bool,
    api_key: str | None,
) -> int:
    """Check whether the server at URL conforms to the APIs of OpenAI and Anthropic."""
    checks = choose(api, only)
    if lists:
        for it in checks:
            click.echo(f"{it.full_name}: {it.description} ({it.source})")
        return 0
    address = late.check_address(url, allow_remote=True)
    results: list[Result] = []
    limits = httpx.Limits(max_keepalive_connections=0)  # a check sees only its own connections
    with httpx.Client(base_url=address, timeout=timeout_s, limits=limits) as client, bar(len(checks)) as progress:
        for result in run_checks(open_server(client, model, api_key), checks, api):
            results.append(result)
            if as_json:
                click.echo(msgspec.json.encode(result))
            progress.say(f"{result.area}.{result.check}")
            progress.advance()
    if not as_json:
        _show(results, verbose=verbose)
    if junit_file is not None:
        junit_file.write_bytes(junit(results))
    return int(any(result.status == "FAILED" for result in results))


def _show(results: list[Result], *, verbose: bool) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_FILE_WIDTH)
    console.print(table(results))
    for result in results if verbose else ():
        if result.curl:
            click.echo(f"{result.area}.{result.check}: {result.description} ({result.source})\n  {result.curl}\n")
    click.echo(summary(results))
