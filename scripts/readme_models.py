"""Writes the README's table of known models: planned for the machine in examples/desktop.json. Measures nothing.

python scripts/readme_models.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from moeflow.cli.main import main  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- models, written by scripts/readme_models.py -->", "<!-- end of models -->"
ROWS = {
    "olmoe-1b-7b": ("8GiB",),
    "gpt-oss-20b": ("16GiB", "8GiB"),
    "qwen3-30b-a3b": ("30GiB", "16GiB", "8GiB"),
    "mixtral-8x7b": ("30GiB", "16GiB"),
}
COLUMNS = (
    "| model | size in memory | RAM for moeflow | experts in RAM | tokens/s |",
    "| --- | ---: | ---: | ---: | ---: |",
)


def table() -> str:
    """Return the table. The first amount of RAM of a model is enough for all of it."""
    lines = [*COLUMNS]
    for model, amounts in ROWS.items():
        forecasts = [_forecast(model, amount) for amount in amounts]
        size = f"{_ram(forecasts[0]) / 2**30:.1f} GiB"
        lines += [
            f"| {model} | {size} | {amount.replace('GiB', ' GiB')} | {_resident(it):.0%} | {_speed(it)} |"
            for amount, it in zip(amounts, forecasts, strict=True)
        ]
    return "\n".join(lines)


def _forecast(model: str, memory: str) -> Mapping[str, Any]:
    machine = ("--machine", str(ROOT / "examples" / "desktop.json"))
    options = ("--quantize", "q4_k_m", "--batch-size", "1", "--memory", memory, "--json")
    done = CliRunner().invoke(main, ["plan", model, *machine, *options], catch_exceptions=False)
    forecast: Mapping[str, Any] = json.loads(done.stdout)["forecast"]
    return forecast


def _ram(forecast: Mapping[str, Any]) -> float:
    return next(float(it["peak_bytes"]["value"]) for it in forecast["memory"] if it["tier"] == "ram")


def _resident(forecast: Mapping[str, Any]) -> float:
    return float(dict(forecast["expert_places"]).get("ram", 1))


def _speed(forecast: Mapping[str, Any]) -> str:
    value, low, high = (forecast["decode_alone_tokens_per_s"][name] for name in ("value", "low", "high"))
    return f"{value:.2g} ({low:.2g} to {high:.2g})"


def with_table(readme: str) -> str:
    """Return the README with the current table between its marks."""
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
