"""Fits the routers of the built-in model and writes them to where the package keeps them.

    python scripts/fit_builtin_routers.py

Run it after a change of the built-in model's recipe, its calibration text or its source. Until then routers are fitted
on the user's machine, which takes minutes instead of seconds.
"""

from __future__ import annotations

from contextlib import closing

from moeflow.checkpoint.open import open_checkpoint
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.builtin import BUILTIN_RECIPE, builtin_source, fingerprint
from moeflow.train.builtin_routers import ROUTERS_FILE, write_routers
from moeflow.train.calibration_text import calibration_text
from moeflow.train.phases import Phase
from moeflow.train.upcycling import fit_routers


def main() -> None:
    """Fit and write."""
    source = builtin_source()
    texts = calibration_text(Tokenizer.load(source).encode).fitting
    with closing(open_checkpoint(source)) as checkpoint:
        routers = fit_routers(checkpoint, texts, BUILTIN_RECIPE, _report)
    write_routers(ROUTERS_FILE, fingerprint(source), routers)
    print(f"\nwrote {ROUTERS_FILE}")


def _report(phase: Phase, done: int, total: int) -> None:
    print(f"\r{phase}: {done / total:.0%} ", end="", flush=True)


if __name__ == "__main__":
    main()
