"""The static baseline with a fake model: right tokens, no block lost, and all the work that padding costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import ConfigError
from moeflow.core.request import FinishReason, Request
from moeflow.scheduler.policy import make_scheduler
from moeflow.scheduler.scheduler import Scheduler
from moeflow.scheduler.static_batching import StaticBatching
from tests.scheduler.fake_model import FakeModel, generate_alone
from tests.scheduler.traffic import AnyTraffic, finish_pass, make_request, prompts, run_pass, run_to_end


class Clock:
    """A clock that stands still until it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make_static(clock=None, **changes) -> StaticBatching:
    values = {
        "block_size": 4,
        "num_blocks": 60,
        "max_model_len": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 200,
        "batch_timeout_s": 0.5,
        "policy": "static",
        **changes,
    }
    return StaticBatching(SchedulerConfig(**values), clock or Clock())


def add_all(scheduler, *jobs: tuple[int, int]) -> list[Request]:
    """Queue a request of so many prompt tokens and so many new ones for each job."""
    requests = [make_request(str(i), [i] * prompt_len, new) for i, (prompt_len, new) in enumerate(jobs)]
    for request in requests:
        scheduler.add(request)
    return requests


@settings(max_examples=150)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=9),
    num_blocks=st.integers(10, 60),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 120),
)
def test_every_request_gets_the_tokens_it_gets_alone(jobs, num_blocks, max_num_seqs, max_num_batched_tokens):
    scheduler = make_static(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    requests = [make_request(str(i), prompt, n) for i, (prompt, n) in enumerate(jobs)]
    for request in requests:
        scheduler.add(request)
    run_to_end(scheduler)
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.output_token_ids == generate_alone(request.prompt_token_ids, request.max_tokens)
        assert (request.num_preemptions, request.num_cached_tokens) == (0, 0)
    assert scheduler.blocks.num_used == 0


@settings(max_examples=100)
@given(
    jobs=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=9),
    max_num_seqs=st.integers(1, 5),
)
def test_a_batch_costs_its_longest_prompt_and_its_longest_answer_in_every_row(jobs, max_num_seqs):
    scheduler, model = make_static(max_num_seqs=max_num_seqs), FakeModel(4)
    add_all(scheduler, *jobs)
    while scheduler.has_work:
        rows = jobs[:max_num_seqs]
        jobs = jobs[max_num_seqs:]
        longest_prompt, longest_answer = (max(lengths) for lengths in zip(*rows, strict=True))
        assert len(scheduler.waiting) == len(rows) + len(jobs), "nobody joins a batch that runs"
        costs = []
        for _ in range(longest_answer):
            batch = scheduler.schedule()
            costs.append(batch.num_tokens)
            finish_pass(scheduler, model, batch)
        assert costs == [len(rows) * longest_prompt] + [len(rows)] * (longest_answer - 1)
        assert not scheduler.running


class Traffic(AnyTraffic):
    def __init__(self) -> None:
        super().__init__(make_static(max_num_batched_tokens=13, num_blocks=24))

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def failing_pass(self):
        batch = self.scheduler.schedule()
        running = list(self.scheduler.running)
        assert self.scheduler.fail(batch) == running
        assert all(request.finish_reason is FinishReason.ERROR for request in running)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60)


def test_a_pass_is_held_back_until_the_batch_is_full_or_the_oldest_has_waited_enough():
    clock, model = Clock(), FakeModel(4)
    scheduler = make_static(clock, max_num_seqs=3)
    assert scheduler.held_s == 0.0  # nothing to hold back
    add_all(scheduler, (2, 5))
    assert scheduler.held_s == pytest.approx(0.5)
    clock.now += 0.4
    add_all(scheduler, (2, 1))
    assert scheduler.held_s == pytest.approx(0.1)
    add_all(scheduler, (2, 1))
    assert scheduler.held_s == 0.0  # full
    run_pass(scheduler, model)
    add_all(scheduler, (2, 1))
    assert scheduler.held_s == 0.0  # the batch that runs is not held back
    run_to_end(scheduler, model)
    add_all(scheduler, (2, 1))
    clock.now += 0.6
    assert scheduler.held_s == 0.0  # waited enough


def test_shorter_prompts_are_padded_on_the_left_and_all_rows_get_their_first_token_together():
    scheduler, model = make_static(max_num_batched_tokens=8), FakeModel(4)  # two rows: four columns a pass
    long, short = add_all(scheduler, (10, 2), (3, 2))
    shares = []
    for _ in range(3):
        batch = scheduler.schedule()
        shares.append([(e.request.request_id, e.start, e.num_tokens, e.samples) for e in batch.entries])
        finish_pass(scheduler, model, batch)
    assert shares == [
        [("0", 0, 4, False), ("padding", 0, 4, False)],
        [("0", 4, 4, False), ("padding", 4, 3, False), ("1", 0, 1, False)],
        [("0", 8, 2, True), ("1", 1, 2, True)],
    ]
    assert len(long.output_token_ids) == len(short.output_token_ids) == 1


def test_a_row_that_is_over_goes_on_costing_a_token_a_pass():
    scheduler, model = make_static(), FakeModel(4)
    add_all(scheduler, (3, 1), (3, 4))
    finish_pass(scheduler, model, scheduler.schedule())
    for _ in range(3):
        batch = scheduler.schedule()
        over = batch.entries[0]
        assert (over.request.request_id, over.start, over.num_tokens) == ("padding", 0, 1)
        finish_pass(scheduler, model, batch)
    assert not scheduler.has_work


def test_a_cancelled_prompt_is_computed_as_padding_to_the_end():
    scheduler, model = make_static(max_num_batched_tokens=8), FakeModel(4)
    gone, _ = add_all(scheduler, (9, 2), (12, 2))
    finish_pass(scheduler, model, scheduler.schedule())
    scheduler.finish(gone, FinishReason.CANCELLED)
    batch = scheduler.schedule()
    assert [(e.request.request_id, e.num_tokens) for e in batch.entries] == [("padding", 4), ("1", 4)]
    finish_pass(scheduler, model, batch)
    run_to_end(scheduler, model)


def test_a_batch_takes_no_more_rows_than_memory_holds_to_the_end():
    scheduler = make_static(num_blocks=20, max_num_seqs=4)  # a row of 12 + 12 tokens takes 6 blocks, and one to spare
    add_all(scheduler, (12, 12), (4, 12), (12, 4), (1, 1))
    scheduler.schedule()
    assert len(scheduler.running) == 2
    run_to_end(make_static(num_blocks=10))


def test_policies_are_chosen_by_name():
    limits = {"num_blocks": 12, "max_model_len": 40}
    assert isinstance(make_scheduler(SchedulerConfig(**limits)), Scheduler)
    assert isinstance(make_scheduler(SchedulerConfig(**limits, policy="static")), StaticBatching)
    with pytest.raises(ConfigError, match="no scheduling policy 'random'; there are continuous, static"):
        make_scheduler(SchedulerConfig(**limits, policy="random"))


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        make_static(max_num_batched_tokens=3)
