"""Batch work alongside interactive requests: the next pass's requests, the ones that give way, and unchanged tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.scheduler.fake_model import FakeModel, generate_alone
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


class Mixed(AnyTraffic):
    """Both kinds come and go at any time; passes take any time, some fail; memory lends more blocks or fewer."""

    pass_s = 0.01

    def __init__(self) -> None:
        super().__init__(make_scheduler(num_blocks=14))

    @rule(prompt=prompts, max_tokens=st.integers(1, 15), is_batch=st.booleans())
    def submit(self, prompt, max_tokens, is_batch):
        self.add(batch_request if is_batch else make_request, prompt, max_tokens)

    @rule(limit=st.integers(10, 14))  # one request of the greatest length always fits
    def lend(self, limit):
        self.scheduler.blocks.limit = limit

    @precondition(lambda self: self.scheduler.has_work)
    @rule(elapsed_s=st.sampled_from([0.001, 0.01, 0.02, 1.0]))
    def one_pass(self, elapsed_s):
        num_waiting = len(self.scheduler.interactive)
        took_part = run_pass(self.scheduler, self.model, elapsed_s)
        if self.scheduler.interactive and num_waiting:  # none of the others may be let in before it
            assert not any(r.is_batch and r.num_computed_tokens == 0 for r in took_part)


TestMixed = Mixed.TestCase
TestMixed.settings = settings(max_examples=60, stateful_step_count=60)


@settings(max_examples=60)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=12),
    late=st.tuples(prompts, st.integers(1, 12)),
    num_passes=st.integers(0, 12),
    num_blocks=st.integers(10, 24),
)
def test_an_arrival_is_in_the_very_next_pass_whatever_the_job_holds(jobs, late, num_passes, num_blocks):
    scheduler, model = make_scheduler(num_blocks=num_blocks), FakeModel(4)
    for number, (prompt, n) in enumerate(jobs):
        scheduler.add(batch_request(str(number), prompt, n))
    for _ in range(num_passes):
        if scheduler.has_work:
            run_pass(scheduler, model, 0.01)
    arrival = make_request("arrival", *late)
    scheduler.add(arrival)
    num_served = 0
    while arrival.finish_reason is None:
        took_part = run_pass(scheduler, model, 0.01)
        assert arrival in took_part
        num_served += 1
    assert num_served <= -(-len(late[0]) // scheduler.config.max_num_batched_tokens) + late[1]
    assert arrival.num_preemptions == 0
    assert arrival.output_token_ids == generate_alone(*late)


def test_a_row_that_sits_out_keeps_its_blocks():
    scheduler, model = make_scheduler(max_num_seqs=2, num_blocks=20), FakeModel(4)
    rows = [batch_request("a", [1] * 4, 12), batch_request("b", [2] * 4, 12)]
    for row in rows:
        scheduler.add(row)
    run_pass(scheduler, model, 0.01)
    chats = [make_request("x", [3], 6), make_request("y", [4], 6)]
    for chat in chats:
        scheduler.add(chat)
    for _ in range(6):
        assert run_pass(scheduler, model, 0.01) == chats  # both places are theirs
        assert all(chat.num_preemptions == 0 for chat in chats)
    run_to_end(scheduler, model, 0.001)
    assert [row.num_preemptions for row in rows] == [0, 0]
    assert all(row.output_token_ids == generate_alone(row.prompt_token_ids, 12) for row in rows)


def test_blocks_are_taken_from_the_youngest_of_the_job():
    scheduler, model = make_scheduler(num_blocks=10, max_model_len=40), FakeModel(4)
    old, young = batch_request("old", [1] * 9, 4), batch_request("young", [2] * 9, 4)
    for row in (old, young):
        scheduler.add(row)
    run_pass(scheduler, model)
    run_pass(scheduler, model)
    scheduler.add(make_request("chat", list(range(20)), 2))
    run_pass(scheduler, model)
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    run_to_end(scheduler, model, 0.001)
    assert young.output_token_ids == generate_alone([2] * 9, 4)


def test_a_job_goes_on_in_the_gaps_of_a_conversation():
    scheduler, model = make_scheduler(max_num_seqs=4, num_blocks=40, max_model_len=100), FakeModel(4)
    rows = [batch_request(str(i), [i], 30) for i in range(3)]
    for row in rows:
        scheduler.add(row)
    chat = make_request("chat", [9], 60)
    scheduler.add(chat)
    num_with_job = 0
    while chat.finish_reason is None:
        before = scheduler.schedule()
        num_batch = sum(entry.request.is_batch for entry in before.entries)
        num_with_job += num_batch > 0
        finish_pass(scheduler, model, before, 0.01 + 0.01 * min(num_batch, 2))
    assert 5 <= num_with_job <= 15  # a pass with all rows costs three, and three tenths are saved each time


def test_prompts_are_computed_ahead_once_the_engine_is_shared():
    scheduler, model = (
        make_scheduler(max_num_seqs=4, num_blocks=80, max_model_len=100, max_num_batched_tokens=20),
        FakeModel(4),
    )
    for number in range(12):
        scheduler.add(batch_request(str(number), [number] * 4, 20))
    for _ in range(3):
        assert len(run_pass(scheduler, model, 0.01)) == 4
    assert len(scheduler.running) == 4  # no other request has ever come
    scheduler.add(make_request("chat", [9], 1))
    while any(not request.is_batch for request in (*scheduler.waiting, *scheduler.running)):
        run_pass(scheduler, model, 0.01)
    while len(scheduler.running) < 8:
        took_part = run_pass(scheduler, model, 0.01)
        assert len(took_part) == 4  # a prompt in the place of a decode, which waits with its blocks
        assert all(request.output_token_ids for request in took_part)
    for _ in range(3):
        assert len(run_pass(scheduler, model, 0.01)) == 4
    run_to_end(scheduler, model, 0.01)
    assert scheduler.num_preemptions == 0


def test_beside_a_conversation_decodes_take_part_and_prompts_wait():
    scheduler, model = (
        make_scheduler(max_num_seqs=4, num_blocks=80, max_model_len=100, max_num_batched_tokens=20),
        FakeModel(4),
    )
    for number in range(4):
        scheduler.add(batch_request(str(number), [number] * 4, 60))
    for _ in range(3):
        run_pass(scheduler, model, 0.01)
    chat = make_request("chat", [9], 30)
    for request in (chat, *(batch_request(f"late {number}", [number] * 4, 60) for number in range(4))):
        scheduler.add(request)
    num_with_job = 0
    while chat.finish_reason is None:
        batch = scheduler.schedule()
        rows = [entry for entry in batch.entries if entry.request.is_batch]
        assert all(entry.num_tokens == 1 for entry in rows)
        assert len(rows) in (0, 3)  # all places besides the chat's
        num_with_job += bool(rows)
        finish_pass(scheduler, model, batch, 0.01 + 0.01 * bool(rows))
    assert num_with_job >= 5


def test_a_job_that_only_has_prompts_goes_on_beside_a_conversation():
    """Nothing decodes, so the savings go to prompts."""
    scheduler, model = (
        make_scheduler(max_num_seqs=4, num_blocks=80, max_model_len=100, max_num_batched_tokens=20),
        FakeModel(4),
    )
    for number in range(3):
        scheduler.add(batch_request(str(number), [number] * 12, 1))
    chat = make_request("chat", [9], 60)
    scheduler.add(chat)
    while chat.finish_reason is None:
        batch = scheduler.schedule()
        num_tokens = sum(entry.num_tokens for entry in batch.entries if entry.request.is_batch)
        finish_pass(scheduler, model, batch, 0.01 + 0.001 * num_tokens)
    assert not any(request.is_batch for request in (*scheduler.waiting, *scheduler.running))


def test_a_job_is_admitted_only_as_far_as_its_answers_will_fit():
    scheduler, model = make_scheduler(num_blocks=12, max_model_len=40, max_num_seqs=8), FakeModel(4)
    rows = [batch_request(str(i), [i] * 4, 12) for i in range(6)]  # four blocks each in the end
    for row in rows:
        scheduler.add(row)
    run_to_end(scheduler, model, 0.001)
    assert scheduler.num_preemptions == 0


def test_a_job_begins_with_its_longest_prompts():
    scheduler = make_scheduler(num_blocks=40, max_num_batched_tokens=100, max_model_len=100)
    for length in (3, 9, 6):
        scheduler.add(batch_request(str(length), [length] * length))
    assert [entry.request.request_id for entry in scheduler.schedule().entries] == ["9", "6", "3"]


def test_a_place_that_is_kept_for_a_prompt_that_finds_no_blocks_goes_to_a_decode():
    """Memory may lend the cache fewer blocks than the condition of algorithm 2 counts on."""
    scheduler, model = make_scheduler(max_num_seqs=1, num_blocks=12), FakeModel(4)
    scheduler.add(make_request("somebody", [1, 2]))  # from now on prompts are computed ahead
    run_to_end(scheduler, model, 0.01)
    scheduler.add(batch_request("decodes", [1, 2, 0], 12))
    run_pass(scheduler, model, 0.01)
    scheduler.blocks.limit = 4
    scheduler.add(batch_request("waits", [0] * 12, 3))
    for _ in range(5):
        assert [request.request_id for request in run_pass(scheduler, model, 0.01)] == ["decodes"]
    scheduler.blocks.limit = 12
    run_to_end(scheduler, model, 0.01)


def test_a_decode_that_is_placed_last_takes_its_blocks_from_younger_ones():
    scheduler, model = make_scheduler(max_num_seqs=1, num_blocks=16, max_model_len=20), FakeModel(4)
    scheduler.add(make_request("somebody", [1, 2]))  # from now on prompts are computed ahead
    run_to_end(scheduler, model, 0.01)
    scheduler.add(batch_request("old", [1, 2, 0], 12))
    run_pass(scheduler, model, 0.01)
    scheduler.add(batch_request("young", [2, 2, 2], 12))
    run_pass(scheduler, model, 0.01)
    old, young = scheduler.running
    scheduler.blocks.limit = 2
    scheduler.add(batch_request("waits", [0] * 12, 3))
    assert run_pass(scheduler, model, 0.01) == [old]
    assert run_pass(scheduler, model, 0.01) == [old]  # which needs a second block
    assert (old.num_preemptions, young.num_preemptions) == (0, 1)
    scheduler.blocks.limit = 16
    run_to_end(scheduler, model, 0.01)
    assert young.output_token_ids == generate_alone([2, 2, 2], 12)


def test_batch_requests_that_may_grow_keep_no_blocks_from_an_interactive_one():
    scheduler, model = make_scheduler(num_blocks=6, max_model_len=20, max_num_batched_tokens=16), FakeModel(4)
    for name in ("a", "b"):
        scheduler.add(batch_request(name, [1, 2, 0, int(name == "a")], 5))
    run_pass(scheduler, model, 0.01)
    scheduler.add(make_request("somebody", [0] * 12, 1))  # three of the four blocks that are left
    batch = scheduler.schedule()
    assert {request.request_id for request in scheduler.running} == {"a", "b", "somebody"}
    finish_pass(scheduler, model, batch, 0.01)
    run_to_end(scheduler, model, 0.01)
