"""llama.cpp's own benchmark, with the experts of some layers on the CPU (`--n-cpu-moe`)."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import gguf
import msgspec

from moeflow.bench.engine_speed import SpeedCase
from moeflow.core.errors import EngineError
from moeflow.core.units import GIB

PROGRAM: Final = "llama-bench"
HEADROOM_BYTES: Final = GIB  # of the GPU, for llama.cpp's buffers, keys and values
_LIMIT_S: Final = 900.0
_EXPERTS: Final = re.compile(r"blk\.(\d+)\..*_exps\.")


class _Line(msgspec.Struct):
    """What the program prints for a test."""

    n_prompt: int
    n_gen: int
    samples_ts: list[float]
    gpu_info: str = ""
    build_number: int = 0
    build_commit: str = ""


class LlamaBench(msgspec.Struct, frozen=True):
    """The program, and how it divides a model."""

    program: Path
    model: Path  # a GGUF file
    num_cpu_layers: int | None  # layers whose experts are on the CPU; None: no GPU computes

    @property
    def options(self) -> list[str]:
        """The options that divide the model."""
        if self.num_cpu_layers is None:
            return ["-ngl", "0"]
        return ["-ngl", "99", "--n-cpu-moe", str(self.num_cpu_layers)]

    def run(self, cases: list[SpeedCase], *, threads: int, rounds: int) -> LlamaFound:
        """Measure one sequence at a time. Raises: EngineError."""
        alone = [case for case in cases if case.batch_size == 1]
        prompts = [str(case.prompt_len) for case in alone if not case.new_tokens]
        answers = [str(case.new_tokens) for case in alone if case.new_tokens]
        command = [str(self.program), "-m", str(self.model), *self.options, "-t", str(threads), "-r", str(rounds)]
        command += ["-o", "jsonl", "-p", ",".join(prompts) or "0", "-n", ",".join(answers) or "0"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(f"{self.program} did not measure: {error}") from error
        if done.returncode:
            last = " / ".join(done.stderr.splitlines()[-3:])
            raise EngineError(f"{self.program} ended with {done.returncode}: {last}")
        lines = [msgspec.convert(json.loads(line), _Line) for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            raise EngineError(f"{self.program} printed no results: it needs -o jsonl, of 2024 or newer")
        speeds = {case.name: it.samples_ts for case in alone for it in lines if _is_of(case, it)}
        return LlamaFound(speeds, lines[0].gpu_info, f"{lines[0].build_number} ({lines[0].build_commit})")


class LlamaFound(NamedTuple):
    """What the program measured."""

    speeds: dict[str, list[float]]  # tokens/s of each round, by case
    gpu: str  # empty: it has no GPU
    version: str


def _is_of(case: SpeedCase, line: _Line) -> bool:
    if case.new_tokens:
        return (line.n_prompt, line.n_gen) == (0, case.new_tokens)
    return (line.n_prompt, line.n_gen) == (case.prompt_len, 0)


def num_cpu_layers(model: Path, capacity_bytes: int) -> int:
    """Return how many of the first layers keep their experts on the CPU, so that the others fit on a GPU."""
    layers: Counter[int] = Counter()
    room = capacity_bytes - HEADROOM_BYTES
    for tensor in gguf.GGUFReader(model).tensors:
        found = _EXPERTS.match(tensor.name)
        if found:
            layers[int(found[1])] += int(tensor.n_bytes)
        else:
            room -= int(tensor.n_bytes)
    for layer in sorted(layers, reverse=True):  # the program counts from the first layer
        room -= layers[layer]
        if room < 0:
            return layer + 1
    return 0
