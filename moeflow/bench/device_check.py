"""`plan --check` for a device that this machine plays: the job that was planned, and each kind of task in its steps.

Predicted is by the clock that the plan was made with; measured are the engine's own passes, taken apart by its trace.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from moeflow.bench.memory import peak_bytes, reset_peak
from moeflow.bench.plan_check import CheckRow
from moeflow.core.errors import EngineError
from moeflow.core.hardware import DEVICE, RAM
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.decision import decide
from moeflow.engine.engine import Engine
from moeflow.engine.messages import Submission
from moeflow.engine.planning import Planned
from moeflow.engine.runner_loading import load_runner
from moeflow.engine.settings import Settings

LEAST_STEPS: Final = 3  # with all sequences, however long they take
MOST_S: Final = 30.0  # of such steps
LEAST_SHARE: Final = 0.01  # of a step that a kind of task takes if it is worth a row
KINDS: Final = {
    "weights_to_pinned": "weights to pinned memory",
    "weights_to_device": "weights to the device",
    "pre_attention": "projections before attention",
    "offload_qkv": "queries, keys and values to the host",
    "cpu_attention": "attention on the host",
    "device_attention": "attention on the device",
    "load_hidden": "what was attended to the device",
    "load_kv": "keys and values to the device",
    "store_kv": "keys and values to the host",
    "post_attention": "projection and experts",
    "route": "projection and routers",
    "offload_routed": "what routers chose to the host",
    "host_experts": "experts on the host",
    "load_sums": "the host's sums to the device",
    "experts": "experts on the device",
}


class DeviceCheck:
    """One engine that runs a plan on a played device."""

    num_steps = 2  # measurements: a request alone, and all of them

    def __init__(self, planned: Planned, settings: Settings, seed: int = 0) -> None:
        assert planned.played is not None, "a device is played"
        self._plan, self._played = planned.plan, planned.played
        self._seed = seed
        self._folder = tempfile.TemporaryDirectory(prefix="moeflow-check-")  # the trace is written when all is over
        self._config = replace(decide(settings), trace_file=str(Path(self._folder.name) / "trace.json"))
        self._first_token_s = self._prompts_s = 0.0
        self._steps: list[tuple[int, int]] = []  # with all sequences: from when to when, in nanoseconds

    def load(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Load the model. Raises: as `load_runner`."""
        reset_peak()
        self._runner = load_runner(self._config, on_progress)
        self._engine = Engine(self._config, self._runner)

    def run(self, on_begin: Callable[[str], None], on_end: Callable[[], None]) -> None:
        """Measure: first tokens of one request, then the job. Raises: EngineError."""
        on_begin("a request alone")
        self._first_tokens(1, "warm-up")
        self._first_token_s = statistics.median(self._first_tokens(1, f"alone {turn}") for turn in range(3))
        on_end()
        on_begin("all requests")
        num = self._plan.policy.batch_size
        try:
            self._prompts_s = self._until_started(num, "all")
            self._decode(num)
        finally:
            self._end()
        on_end()

    def close(self) -> None:
        """Let go of the engine."""
        self._engine.close()
        self._folder.cleanup()

    def rows(self) -> list[CheckRow]:
        """Return what was predicted beside what was measured, the job first."""
        plan, policy, workload = self._plan, self._plan.policy, self._plan.workload
        step_s = statistics.median((end - start) / 1e9 for start, end in self._steps)
        decode_s = plan.time_per_token_s.value
        tokens = policy.batch_size * workload.gen_len
        prompts_s = policy.batch_size * workload.prompt_len / plan.prefill_tokens_per_s.value
        whole_s = self._prompts_s + (workload.gen_len - 1) * step_s
        rows = [
            CheckRow("generated, prefill included", "tokens/s", plan.tokens_per_s.value, tokens / whole_s),
            CheckRow("decode, all together", "tokens/s", policy.batch_size / decode_s, policy.batch_size / step_s),
            CheckRow(
                f"first token of {workload.prompt_len}",
                "ms",
                1000 * plan.time_to_first_token_s.value,
                1000 * self._first_token_s,
            ),
            CheckRow("all first tokens", "s", prompts_s, self._prompts_s),
            *self._kinds(step_s),
        ]
        memory = {used.tier: used.peak_bytes.value for used in plan.memory}
        rows.append(CheckRow("device memory", "bytes", memory[DEVICE], self._runner.device_used_bytes))
        if (peak := peak_bytes()) is not None:
            rows.append(CheckRow("peak memory", "bytes", memory[RAM], peak))
        return rows

    def _kinds(self, step_s: float) -> list[CheckRow]:
        """Return what tasks take of a step by kinds: from their begin to their end, all lanes together."""
        policy, context = self._plan.policy, int(self._plan.workload.mean_context)
        line = self._played.time_line(self._plan.pipeline, policy, [(1, context)] * policy.batch_size)
        predicted: dict[str, float] = defaultdict(float)
        for tasks in line.lanes.values():
            for one in tasks:
                predicted[one.task.op] += one.end_s - one.start_s
        measured = self._traced()
        return [
            CheckRow(f"{kind}, a step", "s", predicted[op], measured.get(op, 0.0))
            for op, kind in KINDS.items()
            if max(predicted[op], measured.get(op, 0.0)) >= LEAST_SHARE * step_s
        ]

    def _traced(self) -> Mapping[str, float]:
        """Return the seconds of each op in a step, on average."""
        trace = self._runner.trace
        assert trace is not None, "a file was named"
        begin, end = self._steps[0][0], self._steps[-1][1]
        seconds: dict[str, float] = defaultdict(float)
        for row in trace.rows:
            for span in row.spans:
                if span.label.task_id is not None and not span.is_blocked and begin <= span.start_ns < end:
                    seconds[span.label.name] += (span.end_ns - span.start_ns) / 1e9 / len(self._steps)
        return seconds

    def _first_tokens(self, num: int, name: str) -> float:
        try:
            return self._until_started(num, name)
        finally:
            self._end()

    def _until_started(self, num: int, name: str) -> float:
        """Submit requests, and return the seconds until each has its first token."""
        start, started = time.perf_counter(), set[str]()
        self._submit(num, name)
        while len(started) < num:
            started |= self._step()
        return time.perf_counter() - start

    def _decode(self, num: int) -> None:
        """Time steps with all sequences, as many as there are and is time for."""
        while len(self._steps) < max(self._plan.workload.gen_len - 2, 1):
            if len(self._steps) >= LEAST_STEPS and self._steps[-1][1] - self._steps[0][0] > MOST_S * 1e9:
                break
            start = time.perf_counter_ns()
            if len(self._step()) < num:
                break
            self._steps.append((start, time.perf_counter_ns()))
        if not self._steps:
            raise EngineError("the answers are over before all requests decode together: make them longer (--gen-len)")

    def _submit(self, num: int, name: str) -> None:
        rng = random.Random(f"{self._seed} {name}")
        workload, vocab_size = self._plan.workload, self._engine.model.vocab_size
        sampling = SamplingParams(max_tokens=workload.gen_len, temperature=1.0, ignore_eos=True)
        for index in range(num):
            prompt = [rng.randrange(vocab_size) for _ in range(workload.prompt_len)]
            self._engine.submit(Submission(f"{name} {index}", prompt, sampling, seed=index))

    def _step(self) -> set[str]:
        """Run a pass; return whose tokens it brought. Raises: EngineError."""
        outputs = self._engine.step()
        for output in outputs:
            if output.error is not None:
                raise EngineError(output.error)
        return {output.request_id for output in outputs}

    def _end(self) -> None:
        self._engine.cancel_all()
        while self._engine.has_work:
            self._engine.step()
