"""`plan --validate`: runs the engine as planned, and compares predictions with measurements.

Predictions are for the measured cases: the same batch, prompt and number of passes, by the plan's own cost model. Where
experts come from disk, splits passes into computing and waiting, and counts their reads. The model and the text
determine how often routers choose experts in memory. So it also predicts a speed from the actual reads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from moeflow.bench.engine_speed import SetBackError, SpeedCase, Stopwatch
from moeflow.bench.memory import peak_bytes, reset_peak
from moeflow.core.engine_messages import EngineStats
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.plan import Policy, Workload
from moeflow.engine.engine import Engine
from moeflow.planner.costs.cost_model import DISK_OFFLOAD, HOST_COMPUTE, CostModel, IntegerPolicy
from moeflow.planner.costs.disk_waits import ExpertReads
from moeflow.planner.described import Planned
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.routing_learning import other_text

REPEATS: Final = 5
LONG_S: Final = 5.0  # what takes longer is measured once
MAX_S: Final = 25.0  # of one measurement: a batch that would take longer is made smaller
NEW_TOKENS: Final = (32, 16, 8, 4, 2, 1)  # decode passes to time: the first that fits


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One figure, as it was predicted and as it was measured."""

    name: str
    unit: str
    predicted: float
    measured: float
    informed: float | None = None  # the prediction from the actual reads from disk

    @property
    def error(self) -> float:
        """How much more was predicted than measured, as a share of that."""
        return self.predicted / self.measured - 1.0 if self.measured else 0.0

    @property
    def informed_error(self) -> float | None:
        """Likewise, from the actual reads."""
        return None if self.informed is None or not self.measured else self.informed / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class _PredictedFigure:
    """What a case should take."""

    seconds: float  # of the timed part
    whole_s: float  # with the prefill that a decoding case starts with


@dataclass(frozen=True, slots=True)
class _PredictedReads:
    """What experts on disk should cost in a case."""

    compute_s: float  # of the timed part, without reads
    read_s: float  # of the whole
    read_bytes: float  # likewise
    reads: ExpertReads  # of a timed pass
    overlap: float  # of these with computing
    expert_bytes: float


@dataclass(slots=True)
class _Measured:
    rates: list[float] = field(default_factory=list)  # tokens a second
    timed_bytes: list[int] = field(default_factory=list)  # read while that was timed
    num_runs: int = 0  # the one that does not count included, as in what follows
    whole_s: float = 0.0
    wait_s: float = 0.0
    read_bytes: int = 0

    def seconds(self, case: SpeedCase) -> float:
        return case.num_tokens / statistics.median(self.rates)


class PlanValidation:
    """One engine that runs a plan."""

    def __init__(self, planned: Planned) -> None:
        """Raise ConfigError for a plan that does not run on this machine's processor."""
        assert planned.plan.forecast is not None, "this machine's speed is known"
        self._workload, self._batch_size = planned.plan.workload, planned.plan.forecast.policy.batch_size
        if planned.estimator is None:
            raise ConfigError(
                "--validate runs plans for the processor, and for devices that weights are streamed to: remove "
                "--device, or name less of its memory (--device cuda:MEMORY)"
            )
        config, self._expected = planned.plan.config, planned.estimator
        self.config = replace(config, scheduler=replace(config.scheduler, prefix_caching=False))
        self._measured: dict[SpeedCase, _Measured] = {}

    def load(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Load the model and choose what to measure. Raises: as `Engine.load`."""
        reset_peak()
        self._engine = Engine.load(self.config, on_progress)
        self._stopwatch = Stopwatch(self._engine, 0, temperature=1.0, text=self._text())
        sizes = sorted({1, self._max_together()})
        decodes = [case for size in sizes if (case := self._decode_case(size)) is not None]
        self.cases = [*decodes, SpeedCase(1, self._workload.prompt_len, 0)]  # decoding ones may become smaller yet

    @property
    def num_steps(self) -> int:
        """How many measurements there are; known once the model is loaded."""
        return sum(self._repeats(case) for case in self.cases)

    def run(self, on_begin: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Measure everything alternately, so that a drift of the machine hits all alike. Short cases run once before,
        without counting. Raises: EngineError.
        """
        for repetition in range(REPEATS + 1):
            for index, case in enumerate(self.cases):
                if repetition >= self._repeats(case):
                    continue
                on_begin(case.name)
                self.cases[index] = self._run_fitting(case, repetition)
                on_end()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    def rows(self) -> list[CheckRow]:
        """Return predictions and measurements, speeds first."""
        rows = [self._speed(case) for case in self.cases]
        if self._reads_alone:
            rows += self._kinds()
        total = sum(self._predict(case).seconds for case in self.cases)
        really = sum(self._measured[it].seconds(it) for it in self.cases)
        rows.append(CheckRow("all speeds' times together", "s", total, really))
        # This process is only one of the ranks, and the prediction is for all.
        if self.config.parallel is None and (peak := peak_bytes()) is not None:
            most = max(
                self._expected.peak_bytes(it.batch_size, it.prompt_len, max(it.new_tokens, 1)) for it in self.cases
            )
            rows.append(CheckRow("peak memory", "bytes", most, peak))
        return rows

    @property
    def _reads_alone(self) -> bool:
        """Whether passes take time for the host's kernels and for reads only."""
        return self.config.experts is not None and self.config.hybrid is None

    def _text(self) -> list[int]:
        """Return what prompts are made of. Which experts come from disk depends on it; otherwise anything will do."""
        try:
            return other_text(Tokenizer.load(self.config.model_path)) if self.config.experts is not None else []
        except CheckpointError:  # a model without a tokenizer
            return []

    def _max_together(self) -> int:
        """Return the largest batch up to the planned one that memory and time allow."""
        size = self._batch_size
        while size > 1:
            case = self._decode_case(size)
            if case is not None and self._predict(case).whole_s <= MAX_S:
                return size
            size = size * 3 // 4
        return 1

    def _decode_case(self, batch_size: int) -> SpeedCase | None:
        """Return as many passes as memory and time allow, or as few as possible; None: memory allows none."""
        prompt_len = self._workload.prompt_len
        cases = [SpeedCase(batch_size, prompt_len, num_new) for num_new in NEW_TOKENS]
        fitting = [case for case in cases if self._stopwatch.why_not(case) is None]
        timely = (case for case in fitting if self._predict(case).whole_s <= MAX_S)
        return next(timely, fitting[-1] if fitting else None)

    def _repeats(self, case: SpeedCase) -> int:
        """Return how often a case runs. The first of several runs does not count.

        Beside a device that is smaller than the model, first passes measure which share of experts suits the host.
        """
        if self._predict(case).whole_s <= LONG_S:
            return REPEATS + 1
        return 1 if self.config.offload is None else 2

    def _run_fitting(self, case: SpeedCase, repetition: int) -> SpeedCase:
        """Measure a case, or a smaller one if its keys and values do not fit because other memory grew; return it."""
        while True:
            try:
                self._run(case, repetition)
                return case
            except SetBackError:
                if repetition or case.batch_size <= 2:
                    raise
                smaller = self._decode_case(case.batch_size * 3 // 4)
                assert smaller is not None, "there was room for more"
                self._measured.pop(case, None)
                case = smaller

    def _run(self, case: SpeedCase, repetition: int) -> None:
        rate, timed_bytes = self._measure(case, repetition)
        measured = self._measured[case]
        if repetition or self._repeats(case) == 1:
            measured.rates.append(rate)
            measured.timed_bytes.append(timed_bytes)

    def _measure(self, case: SpeedCase, repetition: int) -> tuple[float, int]:
        """Return tokens a second, and bytes read meanwhile."""
        at_start: list[EngineStats] = []
        before, start_s = self._engine.stats(), time.perf_counter()
        rate = self._stopwatch.measure(case, repetition, lambda: at_start.append(self._engine.stats()))
        whole_s, after = time.perf_counter() - start_s, self._engine.stats()
        measured = self._measured.setdefault(case, _Measured())
        measured.whole_s += whole_s
        measured.wait_s += after.expert_stall_s_total - before.expert_stall_s_total
        measured.read_bytes += _read_bytes(after) - _read_bytes(before)
        measured.num_runs += 1
        return rate, _read_bytes(after) - _read_bytes(at_start[-1])

    def _predict(self, case: SpeedCase) -> _PredictedFigure:
        passes, (costs, policy) = case.new_tokens, self._costs(case)
        it = costs.predict(policy)
        return _PredictedFigure(
            seconds=passes * it.decode_s if passes else it.prefill_s, whole_s=it.prefill_s + passes * it.decode_s
        )

    def _costs(self, case: SpeedCase) -> tuple[CostModel, Policy]:
        workload = Workload(prompt_len=case.prompt_len, gen_len=max(case.new_tokens, 1), max_prompt_len=case.prompt_len)
        return self._expected.costs(workload), self._expected.policy(case.batch_size, workload.max_tokens)

    def _predict_reads(self, case: SpeedCase) -> _PredictedReads:
        passes, (costs, policy) = case.new_tokens, self._costs(case)
        it, (step_reads, prompt_reads) = costs.predict(policy), costs.num_read(policy)
        num_read = prompt_reads + passes * step_reads
        step_read_s, prompts_read_s = costs.read_s(policy)
        step, prompts = costs.reads(IntegerPolicy.of(policy))
        return _PredictedReads(
            compute_s=passes * it.busy[HOST_COMPUTE] if passes else it.prefill_busy[HOST_COMPUTE],
            read_s=prompts_read_s + passes * step_read_s,
            read_bytes=num_read * costs.costs.expert_bytes,
            reads=step if passes else prompts,
            overlap=costs.overlap if passes else costs.prefill_overlap,
            expert_bytes=costs.costs.expert_bytes,
        )

    def _speed(self, case: SpeedCase) -> CheckRow:
        predicted, measured = self._predict(case).seconds, self._measured[case].seconds(case)
        informed = self._informed_s(case) if self._reads_alone else None
        if case.new_tokens:
            num = case.num_tokens
            return CheckRow(case.name, "tokens/s", num / predicted, num / measured, informed and num / informed)
        name = f"first token of {case.prompt_len}"
        return CheckRow(name, "ms", 1000 * predicted, 1000 * measured, informed and 1000 * informed)

    def _informed_s(self, case: SpeedCase) -> float:
        """Return the prediction for the timed part, from its actual reads."""
        it = self._predict_reads(case)
        passes = case.new_tokens or 1
        num_read = statistics.median(self._measured[case].timed_bytes) / it.expert_bytes
        wait_s = passes * it.reads.wait_s(num_read / passes)
        return CostModel.combine({HOST_COMPUTE: it.compute_s, DISK_OFFLOAD: wait_s}, it.overlap)

    def _kinds(self) -> list[CheckRow]:
        """Return the total time of all runs, prefill of decoding ones included, by kinds of work."""
        pairs = [(self._predict_reads(case), measured) for case, measured in self._measured.items()]
        wait_s = sum(it.read_s * done.num_runs for it, done in pairs)
        compute_s = sum(self._predict(case).whole_s * done.num_runs for case, done in self._measured.items()) - wait_s
        read = sum(it.read_bytes * done.num_runs for it, done in pairs)
        really_wait_s = sum(done.wait_s for _, done in pairs)
        really_compute_s = sum(done.whole_s for _, done in pairs) - really_wait_s
        return [
            CheckRow("computing, in all runs", "s", compute_s, really_compute_s),
            CheckRow("waiting for experts, in all runs", "s", wait_s, really_wait_s),
            CheckRow("experts read, in all runs", "bytes", read, float(sum(done.read_bytes for _, done in pairs))),
        ]


def _read_bytes(stats: EngineStats) -> int:
    return stats.expert_demand_bytes_total + stats.expert_prefetched_bytes_total
