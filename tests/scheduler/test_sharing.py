"""A job beside interactive requests on a virtual clock: what both feel, on a machine like the one that is measured on.

Passes take the times measured there for the built-in model (top 2 of 8 experts in bfloat16, two cores). A time covers
the bytes of the rows' experts and the products of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moeflow.bench.metrics import percentile
from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.request import FinishReason, Request
from moeflow.core.sampling_params import SamplingParams
from moeflow.scheduler.scheduler import Scheduler
from moeflow.workload.offline import SHAPES, made_up_lengths
from moeflow.workload.poisson import Arrival, WorkloadSpec, make_arrivals

LIMITS = SchedulerConfig(
    block_size=16,
    num_blocks=7679,
    max_model_len=8192,
    max_num_seqs=32,
    max_num_batched_tokens=512,
    prefix_caching=False,
)
JOB = SHAPES["reasoning"]
WINDOW = 4 * LIMITS.max_num_seqs  # requests of the job in the engine


def pass_s(num_tokens: int) -> float:
    read_s = (109e6 + 1274e6 * (1 - 0.75**num_tokens)) / 40e9
    return 0.001 + read_s + 0.00046 * min(num_tokens, 33) + 0.000625 * max(num_tokens - 33, 0)


class Run:
    """Serves interactive requests until the last is complete, and a job without end beside them."""

    def __init__(self, arrivals: Sequence[Arrival], *, has_job: bool) -> None:
        self.scheduler = Scheduler(LIMITS)
        self.arrivals = arrivals
        self.lengths = made_up_lengths(JOB, 64, seed=0)
        self.now_s = 0.0
        self.num_job_tokens = 0
        self.num_made = 0
        self.times: dict[Request, list[float]] = {}
        for _ in range(WINDOW if has_job else 0):
            self._feed()

    def _feed(self) -> None:
        length = self.lengths[self.num_made % len(self.lengths)]
        sampling = SamplingParams(max_tokens=JOB.num_new)
        self.scheduler.add(Request(f"j{self.num_made}", [0] * length, sampling, JOB.num_new, is_batch=True))
        self.num_made += 1

    def until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self._step()

    def to_the_end(self) -> list[float]:
        """Return each request's mean time of a token after its first."""
        while len(self.times) < len(self.arrivals) or any(r.finish_reason is None for r in self.times):
            self._step()
        return [(times[-1] - times[0]) / (len(times) - 1) for times in self.times.values()]

    def _step(self) -> None:
        for arrival in self.arrivals[len(self.times) :]:
            if arrival.at_s > self.now_s:
                break
            request = Request("i", arrival.prompt_token_ids, SamplingParams(), arrival.num_new)
            self.times[request] = []
            self.scheduler.add(request)
        if not self.scheduler.has_work:
            self.now_s = self.arrivals[len(self.times)].at_s
            return
        batch = self.scheduler.schedule()
        elapsed_s = pass_s(batch.num_tokens)
        self.now_s += elapsed_s
        self.scheduler.complete(batch, elapsed_s)
        for request in [entry.request for entry in batch.entries if entry.samples]:
            self._advance(request)

    def _advance(self, request: Request) -> None:
        request.output_token_ids.append(0)
        if request.is_batch:
            self.num_job_tokens += 1
        else:
            self.times[request].append(self.now_s)
        if len(request.output_token_ids) == request.max_tokens:
            self.scheduler.finish(request, FinishReason.LENGTH)
            if request.is_batch:
                self._feed()


@pytest.mark.slow
def test_a_job_keeps_four_fifths_and_interactive_tokens_take_less_than_half_longer():
    arrivals = make_arrivals(WorkloadSpec(rate=0.25, num_requests=200, min_new=32, vocab_size=10, seed=0))
    alone = Run(arrivals, has_job=False).to_the_end()
    beside = Run(arrivals, has_job=True)
    together = beside.to_the_end()
    job = Run([], has_job=True)
    job.until(beside.now_s)
    assert percentile([one / other for one, other in zip(together, alone, strict=True)], 50) < 1.35
    assert percentile(together, 99) < 1.45 * percentile(alone, 99)
    assert beside.num_job_tokens > 0.8 * job.num_job_tokens
    assert beside.scheduler.num_preemptions == 0


@pytest.mark.slow
def test_under_a_load_that_never_ends_a_job_goes_on_as_much_as_is_allowed():
    """Four interactive requests at any time; three tenths of their time, at the job's own pace."""
    arrivals = [Arrival(0.01 * number, [0] * 30, 1000) for number in range(4)]
    beside = Run(arrivals, has_job=True)
    together = beside.to_the_end()
    job = Run([], has_job=True)
    job.until(beside.now_s * 0.3 / 1.3)
    assert max(together) < 1.35 * pass_s(4)
    assert beside.num_job_tokens > 0.6 * job.num_job_tokens
