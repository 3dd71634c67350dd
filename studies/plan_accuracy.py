"""Claim: what `moeflow plan` expects is what a run brings.

Runs `moeflow plan --validate` of one model in several ways, each in a process of its own: predicted beside measured.

    python -m studies.plan_accuracy [MODEL] [--case "--quantize int8" --case "--memory 900MiB"]
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from moeflow.bench.plan_validation import CheckRow
from moeflow.bench.records import Record
from moeflow.bench.tables import Table
from moeflow.cli.bench.output import result_options
from moeflow.cli.plan.output import is_speed
from moeflow.cli.progress import bar
from moeflow.core.units import format_bytes
from studies.harness.command import run_study
from studies.harness.records import publish

CASES = ("--dtype bfloat16", "--quantize int8", "--quantize int4", "--dtype bfloat16 --memory 900MiB")


def run(model: str | None, case: str) -> dict[str, Any]:
    """Return the plan and what came of it, as `--validate --json` prints it."""
    command = [str(Path(sys.executable).with_name("moeflow")), "plan", *([model] if model else []), *shlex.split(case)]
    done = subprocess.run([*command, "--validate", "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"moeflow plan {case} --validate ended with {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@click.command(help=__doc__)
@click.argument("model", required=False)
@click.option("--case", "cases", multiple=True, default=CASES, show_default=True, help="Options of `moeflow plan`.")
@result_options
def main(model: str | None, cases: tuple[str, ...], as_json: bool, out: Path | None) -> None:
    """Check each case."""
    found: dict[str, Any] = {}
    with bar(len(cases)) as shown:
        for case in cases:
            shown.say(case)
            found[case] = run(model, case)
            shown.advance()
    config = next(iter(found.values()))["plan"]["config"]
    publish(
        "plan_accuracy",
        table,
        out,
        as_json=as_json,
        threads=config["num_threads"] or None,
        model=Path(config["model_path"]).name,
        cases={case: each["checked"] for case, each in found.items()},
    )


def check_rows(record: Record) -> dict[str, list[CheckRow]]:
    """Return the checks, by case."""
    kept = ("name", "unit", "predicted", "measured", "informed")
    return {
        case: [CheckRow(**{name: row[name] for name in kept}) for row in rows] for case, rows in record["cases"].items()
    }


def speed_errors(record: Record) -> list[float]:
    """Return each speed's prediction error, as a share of the measured speed."""
    return [abs(row.error) for rows in check_rows(record).values() for row in rows if is_speed(row)]


def table(record: Record) -> Table:
    """Return predicted and measured values in all cases."""
    rows = []
    for case, found in check_rows(record).items():
        for row in found:
            predicted, measured = (
                format_bytes(value) if row.unit == "bytes" else f"{value:.4g} {row.unit}"
                for value in (row.predicted, row.measured)
            )
            informed = "" if row.informed_error is None else f"{row.informed_error:+.1%}"
            rows.append((f"{case}: {row.name}", predicted, measured, f"{row.error:+.1%}", informed))
    note = f"Median error of speeds: {statistics.median(speed_errors(record)):.1%}."
    columns = ("", "predicted", "measured", "error", "knowing reads")
    return Table(f"Predicted and measured: {record['model']}", columns, tuple(rows), (note,))


if __name__ == "__main__":
    run_study(main)
