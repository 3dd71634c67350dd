"""`bench engine` as a whole: load, measure alternately, summarize in a record. May be interrupted at any point."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import msgspec

from moeflow.bench.ceilings import Ceilings
from moeflow.bench.engine_speed import SpeedCase, Stopwatch
from moeflow.bench.memory import peak_bytes, reset_peak, resident_bytes
from moeflow.bench.metrics import outliers
from moeflow.checkpoint.open import open_checkpoint
from moeflow.engine.engine import Engine
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.resolve import resolve
from moeflow.settings.settings import Settings

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
PREFILL_LENS = (128, 512, 2048)
MAX_REPEATED = 3  # outliers of a case that are measured again


class EngineRun:
    """One engine under measurement.

    Rounds go over all cases, so that a drift of the machine hits them alike; between rounds the machine's own
    speed is measured again. The first measurement of each case is a warm-up and does not count. Outliers are repeated.
    """

    def __init__(self, settings: Settings, cases: Sequence[SpeedCase], *, repeats: int, seed: int) -> None:
        self.config = resolve(settings).config
        with closing(open_checkpoint(self.config.model_path)) as checkpoint:
            shape = read_model_config(checkpoint)
        self._costs = costs_of(shape, self.config)
        self._cases = list(cases)
        self._repeats = repeats
        self._seed = seed
        self._rates: dict[SpeedCase, list[float]] = {}
        self._outliers: dict[SpeedCase, list[float]] = {}  # that were measured again
        self._skipped: dict[str, str] = {}
        self._memory: dict[str, int | None] = {}
        self._load_s = 0.0
        self._model: dict[str, Any] = {}
        self._ceilings = Ceilings(self.config.num_threads)
        self._is_complete = False

    @property
    def num_steps(self) -> int:
        """How many measurements there are, those of the machine included; known once the model is loaded."""
        return (self._repeats + 1) * (len(self._cases) + 1)

    def load(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Load the model, timed."""
        before = resident_bytes()
        reset_peak()
        start = time.perf_counter()
        self._engine = Engine.load(self.config, on_progress)
        self._load_s = time.perf_counter() - start
        self._memory = {"before_bytes": before, "loaded_bytes": resident_bytes(), "peak_bytes": None}
        self._model = msgspec.structs.asdict(self._engine.model)
        self._stopwatch = Stopwatch(self._engine, self._seed)
        reasons = {case: self._stopwatch.why_not(case) for case in self._cases}
        self._cases = [case for case in self._cases if reasons[case] is None]
        self._skipped = {case.name: reason for case, reason in reasons.items() if reason is not None}

    def run(self, on_begin: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Measure everything. The functions are called before (with what) and after each measurement."""
        for repetition in range(self._repeats + 1):
            for case in self._cases:
                on_begin(case.name if repetition else f"warming up, {case.name}")
                rate = self._stopwatch.measure(case, repetition)
                if repetition:
                    self._rates.setdefault(case, []).append(rate)
                on_end()
            if repetition == 0:
                self._memory["peak_bytes"] = peak_bytes()  # before the ceilings' own buffers
            on_begin("the machine's own speed")
            if self.config.device == "cpu":
                self._ceilings.sample()
            on_end()
        for case in self._cases:
            self._repeat_outliers(case, on_begin)
        self._is_complete = True

    def _repeat_outliers(self, case: SpeedCase, on_begin: Callable[[str], None]) -> None:
        """Measure outliers of a case's rates again; the record keeps both."""
        rates = self._rates.get(case, [])
        for number in range(MAX_REPEATED):
            far = outliers(rates)
            if not far:
                return
            on_begin(f"{case.name}, an outlier again")
            self._outliers.setdefault(case, []).append(rates[far[0]])
            rates[far[0]] = self._stopwatch.measure(case, self._repeats + 1 + number)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def result(self) -> dict[str, Any]:
        """Return the measurements so far, as the fields of a record."""
        limits = self.config.scheduler
        costs = {case: case.cost(self._costs) for case in self._rates}
        kept = ("name", "model_type", "num_parameters", "num_active_parameters", "num_layers", "num_experts", "top_k")
        return {
            "model": {name: self._model.get(name) for name in kept},
            "weight_format": self.config.weight_format,
            "embedding_format": self.config.embedding_format,
            "instruction_set": self.config.cpu_isa,
            "kv_dtype": self.config.kv_dtype,
            "device": self.config.device,
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "weight_bytes": int(self._costs.model_bytes),
            "kv_cache_bytes": self.config.kv_cache_bytes,
            "load_s": self._load_s,
            "memory": self._memory,
            "read_bytes_per_s": self._ceilings.read_bytes_per_s,
            "fp32_flops_per_s": self._ceilings.flops_per_s,
            "cases": [
                {
                    "name": case.name,
                    "batch_size": case.batch_size,
                    "prompt_len": case.prompt_len,
                    "new_tokens": case.new_tokens,
                    "num_tokens": case.num_tokens,
                    "num_bytes": costs[case][0],
                    "num_flops": costs[case][1],
                    "tokens_per_s": rates,
                    "outliers": self._outliers.get(case, []),
                }
                for case, rates in self._rates.items()
            ],
            "skipped": self._skipped,
            "is_complete": self._is_complete,
        }


def make_cases(
    batch_sizes: Sequence[int], prefill_lens: Sequence[int], prompt_len: int, new_tokens: int
) -> list[SpeedCase]:
    """Return the rows of the table."""
    decodes = [SpeedCase(size, prompt_len, new_tokens) for size in batch_sizes]
    return decodes + [SpeedCase(1, length, 0) for length in prefill_lens]
