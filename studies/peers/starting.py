"""From the start of a program to its first token: what someone waits who types a command.

Ours is `moeflow generate` on a packed file, up to the first byte that it writes. A peer is its C interface called from
Python, up to the logits of a prompt of 32 tokens: no tokenizer, no sampling, no text. All from the file cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeflow.core.errors import EngineError
from studies.harness.interleaved import measure_interleaved
from studies.harness.needs import ROOT
from studies.peers.contestants import Contestant
from studies.peers.processes import EngineProcess
from studies.peers.starts_table import OURS

PROMPT = "Write a sentence about the sea, and then another one about the mountains."
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Program:
    """Our command line, with one model."""

    model: Path
    packed: Path
    options: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """How it is started."""
        asked = [
            "--packed-weights",
            str(self.packed),
            "-p",
            PROMPT,
            "--max-tokens",
            "1",
            "--temperature",
            "0",
            *self.options,
        ]
        return [sys.executable, "-m", "moeflow", "generate", str(self.model), *asked]

    def first_token_s(self, threads: int) -> float:
        """Start it, return the seconds up to its first byte, and wait until it has ended. Raises: EngineError."""
        start = time.monotonic()
        process = subprocess.Popen(
            [*self.command, "--threads", str(threads)],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        seconds = time.monotonic() - start
        try:
            _, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise EngineError(f"{' '.join(self.command)} does not end") from None
        if process.returncode != 0 or not first:
            raise EngineError(f"{' '.join(self.command)} failed: {errors.decode(errors='replace')[-500:]}")
        return seconds


def measure(
    program: Program,
    peers: Sequence[Contestant],
    *,
    rounds: int,
    threads: int,
    logs: Path,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Return everyone's seconds in each round after the first. Raises: EngineError."""

    def peer_s(peer: Contestant) -> float:
        say(f"starts: {peer.name}")
        with EngineProcess(peer, threads=threads, seed=0, log=logs / "start.log") as process:
            return float(process.first["start_s"])

    arms = {OURS: partial(program.first_token_s, threads), **{peer.name: partial(peer_s, peer) for peer in peers}}
    return measure_interleaved(arms, rounds)
