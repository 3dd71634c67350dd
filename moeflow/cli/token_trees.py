"""The file of `moeflow generate --token-trees`: the drafted tokens, as a graph or as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moeflow.cli import lazy
from moeflow.cli.params import NEW_FILE

if TYPE_CHECKING:
    from moeflow.text.drafted_passes import DraftedPass

token_trees_option = click.option(
    "--token-trees",
    "token_trees_file",
    type=NEW_FILE,
    help="Write the drafted and accepted tokens of each pass: as a graph for `dot -Tsvg`, "
    "or, if the name ends in .jsonl, as JSON lines.",
)


def check_drafts(overrides: Mapping[str, Any]) -> None:
    """Raises: UsageError if no drafts would be made. For a plan, loading its engine decides that."""
    if not overrides.get("speculators") and overrides["plan_file"] is None:
        raise click.UsageError("--token-trees shows drafted tokens: add a speculator, such as --speculator suffix")


def write_token_trees(file: Path, answers: Mapping[str, Sequence[DraftedPass]]) -> None:
    """Write the passes of each answer, in order, under its name.

    Raises: ClickException if the file cannot be written.
    """
    text = _json_lines(answers) if file.suffix == ".jsonl" else lazy.to_dot(answers)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"cannot write the token trees: {error}") from error


def _json_lines(answers: Mapping[str, Sequence[DraftedPass]]) -> str:
    """Return a line for each pass: the number of its answer, its own, and what the API's `token_trees` has."""
    lines = [
        json.dumps({"answer": answer, "pass": place, **msgspec.to_builtins(one)}, ensure_ascii=False)
        for answer, passes in enumerate(answers.values(), start=1)
        for place, one in enumerate(passes, start=1)
    ]
    return "".join(f"{line}\n" for line in lines)
