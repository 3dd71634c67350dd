"""The scheduler with a fake model: every request gets the tokens it would get alone, and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeflow.core.errors import ConfigError
from moeflow.core.request import FinishReason
from tests.scheduler.fake_model import VOCAB_SIZE, FakeModel, generate_alone
from tests.scheduler.traffic import AnyTraffic, finish_pass, make_request, make_scheduler, prompts, run_pass, run_to_end
from tests.token_trees import token_tree


@settings(max_examples=150)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(10, 24),
    max_num_seqs=st.integers(1, 5),
    max_num_batched_tokens=st.integers(5, 40),
    prefix_caching=st.booleans(),
    rng=st.none() | st.randoms(use_true_random=False),
)
def test_every_request_gets_the_tokens_it_gets_alone(
    jobs, num_blocks, max_num_seqs, max_num_batched_tokens, prefix_caching, rng
):
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefix_caching=prefix_caching,
    )
    requests = [make_request(str(i), prompt, n) for i, (prompt, n) in enumerate(jobs)]
    for request in requests:
        scheduler.add(request)
    run_to_end(scheduler, rng=rng)
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.output_token_ids == generate_alone(request.prompt_token_ids, request.max_tokens)
    assert scheduler.blocks.num_used == 0


class Traffic(AnyTraffic):
    def __init__(self) -> None:
        super().__init__(make_scheduler())


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=60)


def test_decodes_go_on_while_a_long_prompt_is_prefilled_in_chunks():
    scheduler, model = make_scheduler(max_num_batched_tokens=6), FakeModel(4)
    short = make_request("short", [1], 20)
    scheduler.add(short)
    run_pass(scheduler, model)
    long = make_request("long", list(range(20)), 2)
    scheduler.add(long)
    for _ in range(4):  # 20 tokens, 5 left over a pass
        before = len(short.output_token_ids)
        assert set(run_pass(scheduler, model)) == {short, long}
        assert len(short.output_token_ids) == before + 1
    assert long.output_token_ids


def test_equal_prompts_of_one_pass_share_their_full_blocks():
    scheduler = make_scheduler(max_num_batched_tokens=30)
    first, second = (make_request(name, list(range(10)), 3) for name in "ab")
    scheduler.add(first)
    scheduler.add(second)
    batch = scheduler.schedule()
    assert [entry.num_tokens for entry in batch.entries] == [10, 2]
    assert batch.entries[0].block_ids[:2] == batch.entries[1].block_ids[:2]
    assert batch.entries[0].block_ids[2] != batch.entries[1].block_ids[2]
    assert second.num_cached_tokens == 8


def test_a_finished_conversation_is_reused_by_its_next_turn():
    scheduler, model = make_scheduler(), FakeModel(4)
    first = make_request("first", list(range(9)), 8)
    scheduler.add(first)
    run_to_end(scheduler, model)
    turn = make_request("turn", [*first.prompt_token_ids, *first.output_token_ids, 7], 2)
    scheduler.add(turn)
    run_to_end(scheduler, model)
    assert turn.output_token_ids == generate_alone(turn.prompt_token_ids, 2)
    assert turn.num_cached_tokens == 16  # 16 of the 17 earlier tokens were computed and lie in full blocks


def test_the_youngest_is_preempted_and_still_gets_its_tokens():
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    old, young = make_request("old", [1] * 7, 14), make_request("young", [2] * 7, 14)
    scheduler.add(old)
    scheduler.add(young)
    run_to_end(scheduler)
    assert (old.num_preemptions, young.num_preemptions > 0) == (0, True)
    assert scheduler.num_preemptions == young.num_preemptions
    for request in (old, young):
        assert request.output_token_ids == generate_alone(request.prompt_token_ids, 14)


@given(num=st.integers(2, 6), prompt_len=st.integers(1, 9), max_tokens=st.integers(1, 9), num_tokens=st.integers(6, 20))
def test_with_room_for_all_tokens_of_all_requests_none_waits_for_blocks(num, prompt_len, max_tokens, num_tokens):
    """Blocks for just these: a request that has all its blocks keeps none from others."""
    num_blocks = num * -(-(prompt_len + max_tokens - 1) // 4)
    limits = {"num_blocks": num_blocks, "max_model_len": prompt_len + max_tokens, "max_num_batched_tokens": num_tokens}
    scheduler, model = make_scheduler(max_num_seqs=num, prefix_caching=False, **limits), FakeModel(4)
    for index in range(num):
        scheduler.add(make_request(str(index), [index % VOCAB_SIZE] * prompt_len, max_tokens))
    while scheduler.has_work:
        batch = scheduler.schedule()
        assert not scheduler.interactive or batch.num_tokens == num_tokens
        finish_pass(scheduler, model, batch)
    assert scheduler.num_preemptions == 0


def test_requests_of_a_pass_that_is_undone_are_computed_one_by_one():
    scheduler, model = make_scheduler(max_num_batched_tokens=30, num_blocks=20), FakeModel(4)
    decoding, prefilled, like_it = (make_request(*of) for of in (("a", [7]), ("b", [1] * 10), ("c", [1] * 10)))
    scheduler.add(decoding)
    run_pass(scheduler, model)
    scheduler.add(prefilled)
    scheduler.add(like_it)
    assert scheduler.undo(scheduler.schedule())
    assert (scheduler.running, scheduler.waiting) == ([decoding], [prefilled, like_it])  # who lost nothing stays
    scheduler.add(make_request("new", [3]))
    assert [run_pass(scheduler, model) for _ in range(3)] == [[decoding], [prefilled], [like_it]]
    assert len(run_pass(scheduler, model)) == 4
    run_to_end(scheduler, model)
    assert like_it.output_token_ids == prefilled.output_token_ids == generate_alone([1] * 10, 5)
    assert scheduler.num_preemptions == 0


def test_a_tree_that_is_right_brings_its_tokens_in_one_pass():
    scheduler, model = make_scheduler(max_num_batched_tokens=30), FakeModel(4)
    request = make_request("a", [1, 2], 9)
    scheduler.add(request)
    run_pass(scheduler, model)
    output = generate_alone([1, 2], 9)
    batch = scheduler.schedule({request: token_tree([[5, 5], output[1:4], [*output[1:3], 7]])})
    assert (batch.num_tokens, batch.entries[0].num_rows) == (7, 7)
    finish_pass(scheduler, model, batch)
    assert request.output_token_ids == output[:5]
    assert request.is_decoding
    run_to_end(scheduler, model)
    assert request.output_token_ids == output


def test_trees_take_what_others_leave():
    """Of the pass, and of the blocks that running requests need next."""
    scheduler, model = make_scheduler(num_blocks=7, max_model_len=24, max_num_batched_tokens=12), FakeModel(4)
    requests = [make_request(name, [ord(name), 1, 2, 3, 4], 14) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    run_pass(scheduler, model)
    batch = scheduler.schedule({request: token_tree([range(20)]) for request in requests})
    assert [entry.stop for entry in batch.entries] == [6, 6]
    assert [len(entry.tree) for entry in batch.entries] == [6, 2]  # of 7 blocks 3 and 2: either may need one next
    finish_pass(scheduler, model, batch)
    assert len(run_pass(scheduler, model)) == 2
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(("num_prompt", "num_nodes"), [(250, 6), (255, 1), (256, 12), (257, 12)])
def test_a_tree_ends_where_attention_begins_a_new_sum(num_prompt, num_nodes):
    scheduler, model = make_scheduler(num_blocks=100, max_model_len=400, max_num_batched_tokens=300), FakeModel(4)
    request = make_request("a", [1] * (num_prompt - 1), 40)
    scheduler.add(request)
    run_pass(scheduler, model)
    (entry,) = scheduler.schedule({request: token_tree([range(12)])}).entries
    assert (entry.stop, len(entry.tree)) == (num_prompt, num_nodes)


def test_nothing_is_drafted_beyond_the_last_token():
    scheduler, model = make_scheduler(max_num_batched_tokens=30), FakeModel(4)
    request = make_request("a", [1], 4)
    scheduler.add(request)
    run_pass(scheduler, model)
    (entry,) = scheduler.schedule({request: token_tree([range(12), [3, 4, 5]])}).entries
    assert entry.tree == token_tree([[0, 1], [3, 4]])


def test_a_pass_of_one_request_cannot_be_undone():
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1]))
    batch = scheduler.schedule()
    assert not scheduler.undo(batch)
    assert [request.request_id for request in scheduler.fail(batch)] == ["a"]


def test_prompt_logprobs_make_every_position_be_computed():
    scheduler = make_scheduler(max_num_batched_tokens=30)
    scheduler.add(make_request("first", list(range(10)), 2))
    run_to_end(scheduler)
    scheduler.add(make_request("all", list(range(10)), 2, prompt_logprobs=0))
    assert [entry.num_tokens for entry in scheduler.schedule().entries] == [10]


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        make_scheduler(max_num_seqs=9)
    with pytest.raises(ConfigError, match="KV cache holds 48"):
        make_scheduler(max_model_len=49)


def test_tokens_of_the_fake_model_depend_on_the_whole_context():
    assert len({tuple(generate_alone([i], 6)) for i in range(VOCAB_SIZE)}) > VOCAB_SIZE // 2
