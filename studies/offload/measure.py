"""Everyone within a budget, one after another, on the same prompts and the same tokens after them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.harness.memory_limit import MemoryLimit
from studies.offload.contestants import RESIDENT, Model, ours
from studies.peers.contestants import Contestant
from studies.peers.processes import EngineProcess

COUNTED = ("expert_hits_total", "expert_late_total", "expert_misses_total", "expert_stall_s_total")
READ = ("expert_demand_bytes_total", "expert_prefetched_bytes_total", "expert_wasted_bytes_total")


@dataclass(frozen=True)
class Run:
    """Settings that are the same for all contestants."""

    model: Model
    prompts: Sequence[list[int]]  # the first finds nothing in memory
    num_new: int
    threads: int
    seed: int
    say: Callable[[str], None]

    def start(self, contestant: Contestant, prefix: Sequence[str] = ()) -> EngineProcess:
        """Start an engine."""
        log = self.model.folder / "logs" / f"offload-{contestant.name.replace(' ', '-').replace(',', '')}.log"
        self.say(f"{contestant.name}: loading")
        return EngineProcess(contestant, threads=self.threads, seed=self.seed, log=log, prefix=prefix)

    def reference(self) -> tuple[list[list[int]], dict[str, list[float]]]:
        """Return what the model answers where all of it is in memory, and how fast."""
        rates = _no_rates()
        answers = []
        with self.start(ours(RESIDENT, self.model)) as process:
            for number, prompt in enumerate(self.prompts):
                reply = process.ask("follow", prompt=prompt, tokens=[0] * (self.num_new - 1))
                answers.append(reply["tokens"])
                if number:
                    _add_rates(rates, reply, len(prompt), self.num_new - 1)
        return answers, rates

    def within(
        self, budget_bytes: int, contestants: Sequence[Contestant], answers: Sequence[list[int]]
    ) -> list[dict[str, Any]]:
        """Measure all of them under a limit: prompt, then tokens; the first prompt finds nothing in memory.

        They run one after another: engines that map the same file at the same time share its pages, whoever's limit
        those count towards.
        """
        rows = []
        for number, contestant in enumerate(contestants):
            for file in filter(None, (contestant.model, contestant.packed)):
                forget(file)
            with MemoryLimit(str(number), budget_bytes) as limit, self.start(contestant, limit.prefix) as process:
                row = self._row(contestant.name, process, answers)
                row["peak_bytes"] = int(process.ask("memory")["peak_mib"] * 2**20)
                row["group_peak_bytes"] = limit.peak_bytes
            rows.append(row)
        return rows

    def _row(self, name: str, process: EngineProcess, answers: Sequence[list[int]]) -> dict[str, Any]:
        row: dict[str, Any] = {"name": name, **_no_rates(), "is_equal": True, "turns": [], "decode_read_per_token": []}
        for number, (prompt, answer) in enumerate(zip(self.prompts, answers, strict=True)):
            self.say(f"{name}: {f'prompt {number}' if number else 'first prompt'}")
            before = process.ask("counters")
            reply = process.ask("follow", prompt=prompt, tokens=answer[:-1])
            after = process.ask("counters")
            if before:  # ours, which chooses by itself
                row["is_equal"] &= reply["tokens"] == answer
            num_decoded = reply.get("num_decoded", len(answer) - 1)  # one that ends its answer by itself says so
            if number == 0:
                row["first"] = _no_rates()
                _add_rates(row["first"], reply, len(prompt), num_decoded)
                continue
            _add_rates(row, reply, len(prompt), num_decoded)
            row["decode_read_per_token"].append(reply["decode_read_bytes"] / num_decoded)
            row["turns"].append({name: after[name] - before[name] for name in (*COUNTED, *READ) if name in after})
        return row


def forget(file: Path) -> None:
    """Have the system drop a file from its page cache: pages there already would not count towards a limit."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _no_rates() -> dict[str, Any]:
    return {"prefill": [], "decode": []}


def _add_rates(rates: dict[str, Any], reply: dict[str, Any], num_prompt: int, num_new: int) -> None:
    rates["prefill"].append(num_prompt / reply["prefill_s"])
    rates["decode"].append(num_new / reply["decode_s"])
