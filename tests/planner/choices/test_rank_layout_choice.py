"""The layouts of ranks are the ones with the shortest forecast, and the reason has all figures."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest

from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.plan import Policy, Workload
from moeflow.planner.choices.rank_layout_choice import choose_rank_layouts
from moeflow.planner.costs.rank_costs import Sharing
from tests.planner.costs.test_rank_costs import where
from tests.planner.examples import routing, small_model

ALL = [
    ParallelConfig(num_ranks=2, expert_layout=experts, attention_layout=attention, moves_experts=False)
    for attention, experts in product(("replicated", "tensor"), ("expert", "sliced"))
]

POLICY = Policy(batch_size=8, micro_batch=8, attention_on_device=False, ffn_on_device=False)


def costs(on, workload=None, learnt=None):
    more = ({"workload": workload} if workload else {}) | ({"routing": learnt} if learnt else {})
    return lambda parallel: small_model(on, sharing=Sharing(parallel=parallel), overlap=0.0, **more)


def chosen(candidates, model_of, number=8):
    reasons = []
    found = choose_rank_layouts(candidates, model_of, number, reasons)
    return (found.expert_layout, found.attention_layout), dict(reasons).get("layouts of ranks", "")


def test_where_exchanges_cost_nothing_all_is_cut_and_where_they_are_slow_as_little_as_can_be():
    layouts, why = chosen(ALL, costs(where(bytes_per_s=1e12)))
    assert layouts == ("sliced", "tensor")
    assert why.startswith("sliced/tensor: 8 requests together should take ")
    assert all(name in why for name in ("expert/replicated", "sliced/replicated", "expert/tensor"))
    assert why.endswith("routing: taken to be even")
    assert chosen(ALL, costs(where(bytes_per_s=1e4)))[0] == ("expert", "replicated")


@pytest.mark.parametrize("lengths", [(100, 1), (1, 100), (100, 20)])
@pytest.mark.parametrize("rate", [1e6, 1e8, 1e10])
def test_it_is_the_fastest_of_all_for_the_usage(lengths, rate):
    workload = Workload(prompt_len=lengths[0], gen_len=lengths[1], max_prompt_len=lengths[0])
    model_of = costs(where(bytes_per_s=rate), workload)
    layouts, _ = chosen(ALL, model_of)

    def tokens_per_s(parallel):
        model = model_of(parallel)
        policy = dataclasses.replace(POLICY, chunk_tokens=model.chunk_tokens)
        return model.predict(policy).tokens_per_s

    best = max(ALL, key=tokens_per_s)
    assert layouts == (best.expert_layout, best.attention_layout)


def test_what_the_user_says_is_not_weighed_and_what_was_learnt_is_said():
    assert chosen(ALL[:1], costs(where(bytes_per_s=1e12))) == (("expert", "replicated"), "")
    _, why = chosen(ALL, costs(where(), learnt=routing(decode=(0.1,) * 5, prefill=(0.1,) * 5, distinct=0.7)))
    assert why.endswith("routing: as was learnt")
