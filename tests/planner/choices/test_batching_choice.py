"""The number of requests in a batch, and of tokens in a pass, for known speeds."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moeflow.core.errors import CapacityError
from moeflow.core.plan import Workload
from moeflow.planner.choices.batching_choice import MAX_SLOWDOWN, MIN_TOGETHER, PAUSE_S, STEP_S, choose_batching
from moeflow.planner.search.host_search import host_policy
from moeflow.planner.search.objective import Objective, cost_per_token
from moeflow.planner.usage import CONVERSATION, SERVING, Usage
from tests.planner.examples import machine, small_model

MB = 10**6
SHORT = Workload(prompt_len=100, gen_len=20, max_prompt_len=128)


def costs_on(where, **changes):
    model = small_model(where, overlap=0.0, prefill_overlap=0.5, **changes)
    return lambda tokens: dataclasses.replace(model, chunk_tokens=tokens, process_bytes=tokens * 10**3)


def slower(where, factor):
    """Return a machine whose host computes and reads so many times as slowly."""
    levels = []
    for level in where.levels:
        if level.processor is not None:
            peaks = tuple((dtype, flops / factor) for dtype, flops in level.processor.peak_flops_per_s)
            processor = dataclasses.replace(level.processor, peak_flops_per_s=peaks)
            rate = level.read_bytes_per_s / factor
            level = dataclasses.replace(level, processor=processor, read_bytes_per_s=rate)
        levels.append(level)
    return dataclasses.replace(where, levels=tuple(levels))


def choose(usage, costs, objective=None, *, seqs=None, tokens=None):
    objective = objective or Objective(
        goal=usage.goal, num_sequences=usage.num_sequences, max_sequences=usage.max_sequences(has_device=False)
    )
    return choose_batching(usage, objective, costs, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def step_s(model, number):
    return model.predict(host_policy(model, Objective(), number)).decode_s


def prompt_s(costs, tokens):
    workload = Workload(prompt_len=tokens, gen_len=1, max_prompt_len=tokens)
    model = dataclasses.replace(costs(tokens), workload=workload)
    return model.predict(host_policy(model, Objective(), 1)).first_token_s


@pytest.mark.parametrize("factor", [1, 30, 300, 3000])
def test_people_are_not_kept_waiting_for_others(factor):
    costs = costs_on(slower(machine(ram=10**10), factor))
    chosen = choose(SERVING, costs)
    model = costs(chosen.max_num_batched_tokens)
    limit = max(STEP_S, MAX_SLOWDOWN * step_s(model, 1))
    assert chosen.max_num_seqs == MIN_TOGETHER or step_s(model, chosen.max_num_seqs) <= limit
    assert chosen.max_num_seqs == 256 or step_s(model, chosen.max_num_seqs * 3 // 2) > limit
    assert chosen.max_num_batched_tokens == 256 or prompt_s(costs, chosen.max_num_batched_tokens) <= PAUSE_S
    assert chosen.max_num_batched_tokens == 2048 or prompt_s(costs, chosen.max_num_batched_tokens * 2) > PAUSE_S
    assert [name for name, _ in chosen.reasons()] == ["max_num_seqs", "max_num_batched_tokens"]


def test_slower_machines_take_fewer_requests_and_shorter_passes():
    chosen = [choose(SERVING, costs_on(slower(machine(ram=10**10), factor))) for factor in (1, 30, 300)]
    for quick, slow in itertools.pairwise(chosen):
        assert slow.max_num_seqs <= quick.max_num_seqs
        assert slow.max_num_batched_tokens <= quick.max_num_batched_tokens
    assert chosen[0] != chosen[-1]


def test_offline_work_takes_what_brings_most_tokens_a_second():
    costs, usage = costs_on(machine(ram=10**10)), Usage(workload=SHORT, num_requests=40)
    chosen = choose(usage, costs)
    model = costs(chosen.max_num_batched_tokens)

    def cost(number):
        return cost_per_token(model, host_policy(model, Objective(), number), "throughput")

    assert cost(chosen.max_num_seqs) <= min(map(cost, range(1, 41))) * 1.001
    assert 1 < chosen.max_num_seqs <= 40


def test_one_conversation_needs_no_second_place():
    assert choose(CONVERSATION, costs_on(machine(ram=10**10))).max_num_seqs == 1


def test_where_experts_come_from_disk_prompts_are_computed_in_longer_passes():
    long = dataclasses.replace(SERVING, workload=Workload(prompt_len=1500, gen_len=10, max_prompt_len=1500))
    costs = costs_on(machine(ram=45 * MB), workload=long.workload)
    assert choose(long, costs).max_num_batched_tokens > 512
    assert (
        choose(dataclasses.replace(long, is_interactive=False), costs_on(machine(ram=10**10))).max_num_batched_tokens
        == 512
    )


def test_what_the_user_set_stays_and_has_no_reason():
    costs = costs_on(machine(ram=10**10))
    chosen = choose(SERVING, costs, seqs=3, tokens=77)
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens, chosen.reasons()) == (3, 77, [])
    assert [name for name, _ in choose(SERVING, costs, seqs=3).reasons()] == ["max_num_batched_tokens"]
    assert [name for name, _ in choose(SERVING, costs, tokens=77).reasons()] == ["max_num_seqs"]


def test_what_does_not_fit_is_refused():
    with pytest.raises(CapacityError, match="at least"):
        choose(Usage(workload=SHORT), costs_on(machine(ram=MB)))
