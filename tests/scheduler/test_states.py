"""Recurrent states: a request resumes from its own, or from the one of the longest prefix with a state."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from moeflow.core.batch import NO_SLOT
from moeflow.core.engine_config import StateSlotsConfig
from moeflow.core.request import FinishReason
from tests.scheduler.fake_model import FakeModel
from tests.scheduler.traffic import (
    AnyTraffic,
    batch_request,
    finish_pass,
    make_request,
    make_scheduler,
    prompts,
    run_pass,
    run_to_end,
)


def with_states(num_slots: int = 6, checkpoint_every: int = 8, **changes):
    states = StateSlotsConfig(num_slots=num_slots, checkpoint_every=checkpoint_every)
    return make_scheduler(states=states, **changes)


class Traffic(AnyTraffic):
    """Traffic of any kind, with few slots or many."""

    def __init__(self):
        super().__init__(with_states())

    @initialize(num_slots=st.integers(2, 9), every=st.sampled_from([4, 8]), prefix_caching=st.booleans())
    def choose(self, num_slots, every, prefix_caching):
        self.scheduler = with_states(num_slots, every, prefix_caching=prefix_caching)

    @rule(prompt=prompts, max_tokens=st.integers(1, 15))
    def submit_of_a_job(self, prompt, max_tokens):
        self.add(batch_request, prompt, max_tokens)

    @precondition(lambda self: self.scheduler.has_work)
    @rule()
    def one_pass(self):
        run_pass(self.scheduler, self.model)


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60)


def cached_after(scheduler, model, request) -> int:
    scheduler.add(request)
    run_to_end(scheduler, model)
    return request.num_cached_tokens


def test_a_prefix_is_taken_up_at_its_last_checkpoint():
    scheduler, model = with_states(max_num_batched_tokens=64), FakeModel(4)
    assert cached_after(scheduler, model, make_request("a", [1] * 21)) == 0
    assert scheduler.blocks.states.num_checkpoints == 3  # behind 8, 16 and, of its answer, 24 tokens
    assert cached_after(scheduler, model, make_request("b", [1] * 15 + [2])) == 8  # 12 have blocks
    assert cached_after(scheduler, model, make_request("c", [1] * 17)) == 16
    assert cached_after(scheduler, model, make_request("d", [1] * 16)) == 8  # a token is always left to compute
    assert cached_after(scheduler, model, make_request("e", [1] * 7 + [2] * 9)) == 0


def test_a_second_turn_takes_up_what_the_first_one_was_answered():
    scheduler, model = with_states(max_num_batched_tokens=64), FakeModel(4)
    first = make_request("a", [1] * 10, max_tokens=8)
    assert cached_after(scheduler, model, first) == 0
    history = [*first.prompt_token_ids, *first.output_token_ids]
    assert cached_after(scheduler, model, make_request("b", [*history, 1, 2, 3])) == 16


def test_what_lies_behind_a_checkpoint_is_computed_again_and_shared_again():
    """Blocks that the tree has already are no end of what later requests find, nor are they held twice."""
    scheduler, model = (
        with_states(num_slots=8, checkpoint_every=16, max_num_batched_tokens=64, num_blocks=20),
        FakeModel(4),
    )
    assert cached_after(scheduler, model, make_request("a", [1] * 29, max_tokens=1)) == 0
    num_held = scheduler.blocks.num_cached
    second = make_request("b", [1] * 28 + [2] * 8, max_tokens=1)
    assert cached_after(scheduler, model, second) == 16
    assert scheduler.blocks.num_cached == num_held + 2
    assert cached_after(scheduler, model, make_request("c", [1] * 28 + [2] * 8, max_tokens=1)) == 32


def test_a_request_of_the_same_pass_starts_from_a_checkpoint_that_an_earlier_one_writes():
    scheduler, model = with_states(max_num_batched_tokens=64), FakeModel(4)
    requests = [make_request(name, [1] * 10, max_tokens=1) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    first, second = (entry.state for entry in batch.entries)
    assert first.source == NO_SLOT
    assert first.saves == ((8, second.source),)
    assert requests[1].num_cached_tokens == 8
    finish_pass(scheduler, model, batch)


def test_the_least_recently_used_checkpoint_gives_way():
    scheduler, model = with_states(num_slots=3, max_num_batched_tokens=64), FakeModel(4)
    for token in (1, 2, 1, 3):  # one slot is the request's own
        cached_after(scheduler, model, make_request("a", [token] * 9, max_tokens=1))
    cached = [cached_after(scheduler, model, make_request("b", [token] * 9, max_tokens=1)) for token in (1, 3, 2)]
    assert cached == [8, 8, 0]


def test_requests_wait_for_slots_but_checkpoints_do_not_hold_them_up():
    scheduler, model = with_states(num_slots=2, max_num_batched_tokens=64, num_blocks=30), FakeModel(4)
    requests = [make_request(str(token), [token] * 9) for token in (1, 2, 3)]
    for request in requests:
        scheduler.add(request)
    num_running = [run_pass(scheduler, model) and len(scheduler.running) for _ in range(2)]
    assert num_running == [1, 2]  # the first pass keeps a state in the other slot, the second needs it
    run_to_end(scheduler, model)
    assert scheduler.num_preemptions == 0


def test_a_checkpoint_goes_with_its_block():
    scheduler, model = with_states(num_slots=9, max_num_batched_tokens=64), FakeModel(4)
    cached_after(scheduler, model, make_request("a", [1] * 17, max_tokens=1))
    assert scheduler.blocks.states.num_checkpoints == 2
    cached_after(scheduler, model, make_request("b", [2] * 35, max_tokens=1))  # of 12 blocks it takes 9
    assert cached_after(scheduler, model, make_request("c", [1] * 17, max_tokens=1)) == 8
    scheduler.check_integrity()


@pytest.mark.parametrize("concerns_some", [False, True])
def test_what_a_failed_pass_was_to_keep_is_not_taken_up(concerns_some):
    scheduler, model = with_states(max_num_batched_tokens=64), FakeModel(4)
    requests = [make_request(name, [token] * 10, max_tokens=1) for name, token in (("a", 1), ("b", 2))]
    for request in requests:
        scheduler.add(request)
    batch = scheduler.schedule()
    if concerns_some:
        assert scheduler.undo(batch)
        assert not scheduler.running  # their states are neither before nor behind the pass
        run_to_end(scheduler, model)
        assert [request.finish_reason for request in requests] == [FinishReason.LENGTH] * 2
    else:
        scheduler.fail(batch)
        assert scheduler.blocks.states.num_checkpoints == 0
        assert cached_after(scheduler, model, make_request("c", [1] * 10)) == 0
    scheduler.check_integrity()
