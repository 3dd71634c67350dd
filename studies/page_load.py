"""Measures the first load of the page with Lighthouse, on loopback.

    moeflow serve --port 8000 &
    python -m studies.page_load http://127.0.0.1:8000
    python -m studies.page_load http://127.0.0.1:8000 --out docs/studies/results/page_load.jsonl

Needs npm, which fetches Lighthouse in a pinned version, Chromium, and a machine with nothing else to do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import click

from moeflow.cli.bench.output import result_options
from studies.browser import FLAGS, MISSING, find_browser
from studies.harness.command import run_study
from studies.harness.records import publish
from studies.page_load_table import table

LIGHTHOUSE: Final = "13.5.0"
DEVICES: Final = {"phone": [], "desktop": ["--preset=desktop"]}  # with Lighthouse's options
_SECONDS: Final = ("first-contentful-paint", "largest-contentful-paint", "speed-index", "total-blocking-time")
_TIMEOUT_S: Final = 180


def load_once(url: str, options: list[str], browser: str) -> dict[str, Any]:
    """Return Lighthouse's whole report of one load. Raises: ClickException with the end of its messages."""
    command = ["npx", "--yes", f"lighthouse@{LIGHTHOUSE}", url, *options, "--quiet", "--only-categories=performance"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command += ["--output=json", f"--output-path={report}", f"--chrome-flags={' '.join([*FLAGS, '--headless'])}"]
        done = subprocess.run(
            command, env={**os.environ, "CHROME_PATH": browser}, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode:
            raise click.ClickException(f"Lighthouse failed: {done.stderr[-1000:]}")
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def figures(report: dict[str, Any]) -> dict[str, float]:
    """Return the score, from 0 to 100, the seconds, and the sum of layout shifts of a report."""
    audits = report["audits"]
    return {
        "score": 100 * report["categories"]["performance"]["score"],
        **{f"{name.replace('-', '_')}_s": audits[name]["numericValue"] / 1000 for name in _SECONDS},
        "layout_shift": audits["cumulative-layout-shift"]["numericValue"],
    }


@click.command(help=__doc__)
@click.argument("url")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@result_options
def main(url: str, repeats: int, as_json: bool, out: Path | None) -> None:
    """Load the page again and again, for each device in turn."""
    browser = find_browser()
    if browser is None:
        raise click.ClickException(MISSING)
    if shutil.which("npx") is None:
        raise click.ClickException("npx is not installed (Debian: apt-get install npm)")
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in DEVICES}
    version = ""
    for _ in range(repeats):
        for name, options in DEVICES.items():
            report = load_once(url, options, browser)
            runs[name].append(figures(report))
            version = report["environment"]["hostUserAgent"].partition("Chrome/")[2].partition(" ")[0]
    publish(
        "page_load",
        table,
        out,
        as_json=as_json,
        browser=version,
        lighthouse=LIGHTHOUSE,
        devices=[{"name": name, "runs": found} for name, found in runs.items()],
    )


if __name__ == "__main__":
    run_study(main)
