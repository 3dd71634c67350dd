"""Engines measured alternately: ours, a peer, the next, ours, ... so that a drift of the machine hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from moeflow.bench.engine_speed import SpeedCase
from moeflow.core.errors import MoeflowError
from moeflow.kernels.ceilings import measure_read
from studies.peers.contestants import Contestant, convert
from studies.peers.processes import EngineProcess
from studies.peers.tables import MEMORY, RATE

CASES = {  # by what an option calls them
    "decode-1": SpeedCase(1, 32, 64),
    "decode-8": SpeedCase(8, 32, 32),
    "decode-32": SpeedCase(32, 32, 16),
    "prefill-512": SpeedCase(1, 512, 0),
    "prefill-4096": SpeedCase(1, 4096, 0),
    "context-8192": SpeedCase(1, 8192, 32),
}
WARM_UP_TOKENS = 2
WARM_UP_PREFILL = 512  # at most
STARTS = {  # an engine's measurement of its start -> the name of the row
    "load_s": "load",
    "first_token_s": "load to first token",
    "start_s": "process start to first token",
}


def row_name(case: SpeedCase) -> str:
    """Return what a case is called in tables; a long context is named."""
    long = case.new_tokens and case.prompt_len > 32
    return f"{case.name}, {case.prompt_len} tokens of context" if long else case.name


@dataclass
class _Row:
    unit: str
    values: dict[str, list[float]] = field(default_factory=dict)  # by contestant
    foreign_cpu: dict[str, list[float]] = field(default_factory=dict)


class Turns:
    """A measurement of several engines. One that fails is left out from then on; `failures` says why."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        *,
        cases: Sequence[SpeedCase],
        threads: int,
        seed: int,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self._contestants = list(contestants)
        self._cases = cases
        self._threads = threads
        self._seed = seed
        self._logs = logs
        self._say = say
        self._rows: dict[str, _Row] = {}
        self.failures: dict[str, MoeflowError] = {}
        self.read_bytes_per_s: list[float] = []  # what the machine read before each case of each round

    def run(self, *, starts: int, rounds: int) -> None:
        """Start each engine so many times; its last process then computes every case in so many rounds."""
        for contestant in self._contestants:
            self._attempt(contestant, partial(_prepare, contestant))
        for _ in range(starts - 1):
            for contestant in self._present:
                self._attempt(contestant, partial(self._start_once, contestant))
        with ExitStack() as stack:
            processes: dict[str, EngineProcess] = {}

            def start(contestant: Contestant) -> None:
                processes[contestant.name] = stack.enter_context(self._start(contestant))

            for contestant in self._present:
                self._attempt(contestant, partial(start, contestant))
            for round_number in range(rounds + 1):
                for case in self._cases:
                    if round_number:
                        self.read_bytes_per_s.append(measure_read(self._threads))
                    for contestant in self._present:
                        process = processes[contestant.name]
                        self._attempt(contestant, partial(self._measure, process, case, round_number == 0))
            for contestant in self._present:
                peak_mib = processes[contestant.name].ask("memory")["peak_mib"]
                self._add(contestant, "peak memory", "MiB", peak_mib)

    def pair(self, ours: Contestant, peer: Contestant) -> list[dict[str, Any]]:
        """Return the rows of two of them, side by side."""
        return [
            {
                "name": name,
                "unit": row.unit,
                "ours": row.values[ours.name],
                "peer": row.values[peer.name],
                "foreign_cpu": {
                    side: row.foreign_cpu.get(each.name, []) for side, each in (("ours", ours), ("peer", peer))
                },
            }
            for name, row in self._rows.items()
        ]

    @property
    def _present(self) -> list[Contestant]:
        return [each for each in self._contestants if each.name not in self.failures]

    def _attempt(self, contestant: Contestant, act: Callable[[], None]) -> None:
        try:
            act()
        except MoeflowError as error:
            self._say(f"error: {error}")
            self.failures[contestant.name] = error

    def _start_once(self, contestant: Contestant) -> None:
        self._start(contestant).close()

    def _start(self, contestant: Contestant) -> EngineProcess:
        self._say(f"{contestant.name}: loading")
        log = self._logs / f"{contestant.name.replace(' ', '-').replace(',', '')}.log"
        process = EngineProcess(contestant, threads=self._threads, seed=self._seed, log=log)
        for key, name in STARTS.items():
            self._add(contestant, name, "s", process.first[key], process.first["foreign_cpu"])
        self._add(contestant, MEMORY, "MiB", process.first["resident_mib"])
        return process

    def _measure(self, process: EngineProcess, case: SpeedCase, is_warm_up: bool) -> None:
        name = row_name(case)
        self._say(f"{process.contestant.name}: {'warming up, ' if is_warm_up else ''}{name}")
        if not case.new_tokens:
            length = min(case.prompt_len, WARM_UP_PREFILL) if is_warm_up else case.prompt_len
            reply = process.ask("prefill", prompt_len=length)
        else:
            new_tokens = WARM_UP_TOKENS if is_warm_up else case.new_tokens
            reply = process.ask("decode", batch_size=case.batch_size, prompt_len=case.prompt_len, new_tokens=new_tokens)
        if not is_warm_up:
            rate = case.num_tokens / reply["seconds"]
            self._add(process.contestant, name, RATE, rate, reply["foreign_cpu"])

    def _add(
        self, contestant: Contestant, name: str, unit: str, value: float, foreign_cpu: float | None = None
    ) -> None:
        row = self._rows.setdefault(name, _Row(unit))
        row.values.setdefault(contestant.name, []).append(value)
        if foreign_cpu is not None:
            row.foreign_cpu.setdefault(contestant.name, []).append(round(foreign_cpu, 3))


def _prepare(contestant: Contestant) -> None:
    """Make its model, and read it once, so that loads are measured from the file cache."""
    convert(contestant)
    for path in (contestant.model, contestant.packed):
        if path is not None:
            read_all(path)


def read_all(model: Path) -> None:
    """Read a model's files once."""
    for file in weight_files(model):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def weight_files(model: Path) -> list[Path]:
    """Return the files that the weights lie in."""
    return [model] if model.is_file() else sorted([*model.glob("*.safetensors"), *model.glob("openvino_model.bin")])
