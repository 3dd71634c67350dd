"""Ways to run a model that is larger than its GPU: moeflow's, and the programs to compare them with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moeflow.bench.engine_speed import SpeedCase
from moeflow.core.errors import ConfigError, MoeflowError
from moeflow.core.offload_config import PREFIX, parse_cuda_device, parse_emulated_device
from moeflow.pipeline.catalog import OFFLOADING
from studies.offload.llama_bench import LlamaBench
from studies.peers.contestants import Contestant
from studies.peers.processes import EngineProcess
from studies.peers.turns import WARM_UP_TOKENS

HYBRID: Final = "hybrid"
STREAMING: Final = "hybrid, all passes stream"  # experts that are not on the GPU, in each pass
CPU: Final = "CPU alone"
LLAMA: Final = "llama.cpp, {} layers' experts on the CPU"
LLAMA_CPU: Final = "llama.cpp, CPU alone"


@dataclass(frozen=True)
class Device:
    """A part of a GPU's memory, or an emulated GPU."""

    text: str  # as --device of moeflow
    capacity_bytes: int
    gpu: str  # as torch calls it; empty: emulated

    @classmethod
    def of(cls, text: str) -> Device:
        """Read a device. Raises: ConfigError."""
        if text.split(":")[0] == PREFIX:
            return cls(text, parse_emulated_device(text).capacity_bytes, "")
        gpu, capacity_bytes = parse_cuda_device(text)
        if capacity_bytes is None:
            raise ConfigError(f"device {text!r} has no size: name its memory too, such as {gpu}:8GiB")
        return cls(text, capacity_bytes, gpu)


def ways(model: Path, device: Device, shared: Mapping[str, Any]) -> list[Contestant]:
    """Return moeflow's ways on a device, the fastest expected ones first; `shared` are settings of all."""

    def way(name: str, wish: Mapping[str, Any] | None = None, **settings: Any) -> Contestant:
        asked = {"model": str(model), "settings": {**shared, **settings}, **(wish or {})}
        return Contestant(name, Path(sys.executable), "moeflow_engine", asked, "temperature 1")

    found = [way(CPU, device="cpu")]
    if device.gpu:
        on_gpu = {"device": device.gpu, "gpu_memory_bytes": device.capacity_bytes}
        streaming = {"hybrid": {"stream_tokens": 1}}
        found = [way(HYBRID, {"hybrid": {}}, **on_gpu), *found, way(STREAMING, streaming, **on_gpu)]
    return [*found, *(way(name, device=device.text, pipeline=name) for name in OFFLOADING)]


@dataclass(frozen=True)
class Measurement:
    """Settings that are the same for all ways. They run one after another: each has memory for all experts."""

    cases: Sequence[SpeedCase]
    threads: int
    rounds: int
    seed: int
    logs: Path
    say: Callable[[str], None]

    def of_ours(self, contestant: Contestant) -> dict[str, Any]:
        """Return a way's tokens/s, or the reason for which it does not run."""
        self.say(f"{contestant.name}: loading")
        log = self.logs / f"device-{contestant.name.replace(' ', '-').replace(',', '')}.log"
        row: dict[str, Any] = {"name": contestant.name, "speeds": {}, "error": ""}
        try:
            with EngineProcess(contestant, threads=self.threads, seed=self.seed, log=log) as process:
                for number in range(self.rounds + 1):
                    for case in self.cases:
                        self.say(f"{contestant.name}: {f'round {number}' if number else 'warming up'}, {case.name}")
                        speed = _speed(process, case, is_warm_up=number == 0)
                        if number:
                            row["speeds"].setdefault(case.name, []).append(round(speed, 3))
                row["counters"] = process.ask("counters")
        except MoeflowError as error:
            row["error"] = str(error)
        return row

    def of_llama(self, bench: LlamaBench) -> dict[str, Any]:
        """Return llama.cpp's tokens/s, or the reason for which it does not run."""
        name = LLAMA_CPU if bench.num_cpu_layers is None else LLAMA.format(bench.num_cpu_layers)
        self.say(f"{name}: {bench.program}")
        try:
            found = bench.run(list(self.cases), threads=self.threads, rounds=self.rounds)
        except MoeflowError as error:
            return {"name": name, "speeds": {}, "error": str(error)}
        named = name if found.gpu else LLAMA_CPU
        return {"name": named, "speeds": found.speeds, "error": "", "version": found.version, "gpu": found.gpu}


def _speed(process: EngineProcess, case: SpeedCase, *, is_warm_up: bool) -> float:
    """Return tokens/s."""
    if not case.new_tokens:
        return case.num_tokens / float(process.ask("prefill", prompt_len=case.prompt_len)["seconds"])
    number = WARM_UP_TOKENS if is_warm_up else case.new_tokens
    reply = process.ask("decode", batch_size=case.batch_size, prompt_len=case.prompt_len, new_tokens=number)
    return case.batch_size * number / float(reply["seconds"])
