"""Everyone within a budget, in turns, on the same prompts and the same tokens after them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.offload.contestants import PEER, RESIDENT, ours
from benchmarks.offload.limit import MemoryLimit
from benchmarks.peers.contestants import Contestant
from benchmarks.peers.processes import EngineProcess

COUNTED = ("expert_hits_total", "expert_late_total", "expert_misses_total", "expert_stall_s_total")
READ = ("expert_demand_bytes_total", "expert_prefetched_bytes_total", "expert_wasted_bytes_total")


@dataclass(frozen=True)
class Run:
    """What is the same for all contestants."""

    folder: Path
    prompts: Sequence[list[int]]  # the first is for warming up
    num_new: int
    threads: int
    seed: int
    say: Callable[[str], None]

    def start(self, contestant: Contestant, prefix: Sequence[str] = ()) -> EngineProcess:
        """Start an engine."""
        log = self.folder / "logs" / f"offload-{contestant.name.replace(' ', '-').replace(',', '')}.log"
        self.say(f"{contestant.name}: loading")
        return EngineProcess(contestant, threads=self.threads, seed=self.seed, log=log, prefix=prefix)

    def reference(self) -> tuple[list[list[int]], dict[str, list[float]]]:
        """Return what the model answers where all of it is in memory, and how fast."""
        rates = _no_rates()
        answers = []
        with self.start(ours(RESIDENT, self.folder)) as process:
            for number, prompt in enumerate(self.prompts):
                reply = process.ask("follow", prompt=prompt, tokens=[0] * (self.num_new - 1))
                answers.append(reply["tokens"])
                if number:
                    _add_rates(rates, reply, len(prompt), self.num_new - 1)
        return answers, rates

    def within(
        self, budget_bytes: int, contestants: Sequence[Contestant], answers: Sequence[list[int]]
    ) -> list[dict[str, Any]]:
        """Measure all of them under a limit, in turns: prompt, then tokens."""
        rows: list[dict[str, Any]] = []
        with ExitStack() as stack:
            limits, processes = [], []
            for number, contestant in enumerate(contestants):
                if contestant.name == PEER:
                    forget(contestant.model)
                limits.append(stack.enter_context(MemoryLimit(str(number), budget_bytes)))
                processes.append(stack.enter_context(self.start(contestant, limits[-1].prefix)))
                rows.append({"name": contestant.name, **_no_rates(), "is_equal": True, "turns": []})
            for number, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
                for row, process in zip(rows, processes, strict=True):
                    self.say(f"{row['name']}: {f'prompt {number}' if number else 'warming up'}")
                    self._turn(row, process, prompt, answer, is_warm_up=number == 0)
            for row, process, limit in zip(rows, processes, limits, strict=True):
                row["peak_bytes"] = int(process.ask("memory")["peak_mib"] * 2**20)
                row["group_peak_bytes"] = limit.peak_bytes
        return rows

    def _turn(
        self, row: dict[str, Any], process: EngineProcess, prompt: list[int], answer: list[int], *, is_warm_up: bool
    ) -> None:
        before = process.ask("counters")
        reply = process.ask("follow", prompt=prompt, tokens=answer[:-1])
        after = process.ask("counters")
        if before:  # ours, which chooses by itself
            row["is_equal"] &= reply["tokens"] == answer
        if is_warm_up:
            return
        _add_rates(row, reply, len(prompt), len(answer) - 1)
        row["turns"].append({name: after[name] - before[name] for name in (*COUNTED, *READ) if name in after})


def forget(file: Path) -> None:
    """Have the system drop a file from its page cache: pages there already would not count towards a limit."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def model_bytes(folder: Path) -> int:
    """Return how large the weights are."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _no_rates() -> dict[str, Any]:
    return {"prefill": [], "decode": []}


def _add_rates(rates: dict[str, Any], reply: dict[str, Any], num_prompt: int, num_new: int) -> None:
    rates["prefill"].append(num_prompt / reply["prefill_s"])
    rates["decode"].append(num_new / reply["decode_s"])
