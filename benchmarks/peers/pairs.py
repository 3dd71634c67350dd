"""Two engines measured in turns: ours, the peer, ours, the peer, ... so that a drift of the machine hits both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.contestants import Contestant, convert
from benchmarks.peers.processes import EngineProcess
from moeflow.bench.engine_speed import Case

CASES = (Case(1, 32, 64), Case(8, 32, 32), Case(32, 32, 16), Case(1, 512, 0))
WARM_UP_TOKENS = 2
STARTS = {  # what an engine tells of its start -> the name of the row
    "load_s": "load",
    "first_token_s": "load to first token",
    "start_s": "process start to first token",
}
SIDES = ("ours", "peer")


class Pair:
    """The measurement of one pair. Rows are kept as they come in: a run that is stopped keeps what it has."""

    def __init__(
        self, ours: Contestant, peer: Contestant, *, threads: int, seed: int, logs: Path, say: Callable[[str], None]
    ) -> None:
        self._contestants = {"ours": ours, "peer": peer}
        self._threads = threads
        self._seed = seed
        self._logs = logs
        self._say = say
        self._rows: dict[str, dict[str, Any]] = {}

    def run(self, *, starts: int, rounds: int) -> list[dict[str, Any]]:
        """Start each engine so many times, the last pair of processes then computes every case in so many rounds.

        Raises: EngineError if an engine fails.
        """
        for contestant in self._contestants.values():
            convert(contestant)
            for path in (contestant.model, contestant.packed):
                if path is not None:
                    read_all(path)
        for _ in range(starts - 1):
            for side in SIDES:
                self._start(side).close()
        with ExitStack() as stack:
            processes = {side: stack.enter_context(self._start(side)) for side in SIDES}
            for round_number in range(rounds + 1):
                for case in CASES:
                    for side in SIDES:
                        self._measure(side, processes[side], case, is_warm_up=round_number == 0)
            for side in SIDES:
                self._add(side, "peak memory", "MiB", processes[side].ask("memory")["peak_mib"])
        return list(self._rows.values())

    def _start(self, side: str) -> EngineProcess:
        contestant = self._contestants[side]
        self._say(f"{contestant.name}: loading")
        log = self._logs / f"{contestant.name.replace(' ', '-')}.log"
        process = EngineProcess(contestant, threads=self._threads, seed=self._seed, log=log)
        for key, name in STARTS.items():
            self._add(side, name, "s", process.first[key], foreign_cpu=process.first["foreign_cpu"])
        self._add(side, "memory after the first token", "MiB", process.first["resident_mib"])
        return process

    def _measure(self, side: str, process: EngineProcess, case: Case, *, is_warm_up: bool) -> None:
        self._say(f"{process.contestant.name}: {'warming up, ' if is_warm_up else ''}{case.name}")
        if not case.new_tokens:
            reply = process.ask("prefill", prompt_len=case.prompt_len)
        else:
            new_tokens = WARM_UP_TOKENS if is_warm_up else case.new_tokens
            reply = process.ask("decode", batch_size=case.batch_size, prompt_len=case.prompt_len, new_tokens=new_tokens)
        if not is_warm_up:
            rate = case.num_tokens / reply["seconds"]
            self._add(side, case.name, "tokens/s", rate, foreign_cpu=reply["foreign_cpu"])

    def _add(self, side: str, name: str, unit: str, value: float, foreign_cpu: float | None = None) -> None:
        empty = {"name": name, "unit": unit, "ours": [], "peer": [], "foreign_cpu": {"ours": [], "peer": []}}
        row = self._rows.setdefault(name, empty)
        row[side].append(value)
        if foreign_cpu is not None:
            row["foreign_cpu"][side].append(round(foreign_cpu, 3))


def read_all(model: Path) -> None:
    """Read a model's files once, so that loads are measured from the file cache."""
    for file in [model] if model.is_file() else sorted(model.glob("*.safetensors")):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass
