"""What is read ahead: the predictor's guesses, for passes of few tokens, as long as the governor lets it."""

from __future__ import annotations

import torch

from moeflow.core.trial import Trial
from moeflow.experts.predict.combined import CombinedPredictor
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor
from moeflow.experts.prefetcher import Prefetcher
from moeflow.kernels.cpu.decoder import NOTHING


class Cache:
    num_experts = 8

    def __init__(self):
        self.asked = []
        self.asked_of_passes = []

    def prefetch_pass(self, numbers):
        self.asked_of_passes.append(numbers)
        return len(numbers)

    def prefetch(self, layer, experts):
        self.asked.append((layer, list(experts)))


class Block:
    """Sends every token to the expert that its input names, and to the one after it."""

    def route(self, hidden):
        first = hidden[:, :1].long()
        return torch.cat([first, first + 1], dim=1), torch.ones(len(hidden), 2)


MODEL = RoutedModel(2, 8, [Block(), Block()])


def trusted(predictor, num_layers=2):
    """Return a prefetcher after passes that took half the time with prefetches."""
    cache = Cache()
    prefetcher = Prefetcher(cache, predictor, Trial("guess"), num_layers)
    for _ in range(100):
        prefetcher.expected(1)
        prefetcher.end_pass(0.5 if prefetcher.is_on else 1.0, 0.0)
    assert prefetcher.is_on
    assert cache.asked == []
    return prefetcher, cache


def inputs(*experts):
    return torch.tensor([[float(expert), 0.0] for expert in experts])


def test_the_next_layers_router_is_asked_and_the_commonest_come_first():
    prefetcher, cache = trusted(NextRouter(MODEL))
    chosen = torch.zeros(3, 2, dtype=torch.int64)
    prefetcher.see(0, inputs(4, 5, 5), chosen)
    prefetcher.see(1, inputs(1, 1, 1), chosen)
    assert cache.asked == [(1, [5, 6, 4])]


def test_a_pass_of_many_tokens_reads_nothing_ahead():
    prefetcher, cache = trusted(NextRouter(MODEL))
    prefetcher.see(0, inputs(*range(9)), torch.zeros(9, 2, dtype=torch.int64))
    assert cache.asked == []


def test_a_predictor_that_does_not_pay_is_switched_off_and_that_is_said():
    cache = Cache()
    prefetcher = Prefetcher(cache, NextRouter(MODEL), Trial("guess"), 2)
    for _ in range(100):
        assert prefetcher.expected(1).routers_ahead == prefetcher.is_on
        prefetcher.end_pass(2.0 if prefetcher.is_on else 1.0, 0.0)
    assert not prefetcher.is_on
    assert "more time" in prefetcher.trial.reason
    prefetcher.see(0, inputs(4), torch.zeros(1, 2, dtype=torch.int64))
    assert cache.asked == []
    assert prefetcher.expected(1) == NOTHING


def test_passes_that_lack_nothing_and_large_ones_are_not_judged():
    prefetcher, _ = trusted(NextRouter(MODEL))
    for number in range(2000):
        if number % 2:
            assert prefetcher.expected(9) == NOTHING
        assert prefetcher.end_pass(1000.0, 0.0) is None
    assert prefetcher.is_on


def test_what_does_not_depend_on_the_pass_is_expected_of_all_layers_at_once():
    prefetcher, cache = trusted(PreviousTokenPredictor(MODEL))
    prefetcher.expected(1)
    prefetcher.see_hits(0, torch.tensor([[[1, 3]], [[0, 2]]]))
    assert cache.asked == [(0, [1, 3])]  # for the next pass
    assert prefetcher.expected(1).guesses[:, :4].tolist() == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_what_a_model_that_guesses_lacked_is_not_the_passs():
    prefetcher, _ = trusted(NextRouter(MODEL))
    for _ in range(2000):
        prefetcher.expected(1)  # the first layers, computed before the pass
        prefetcher.begin_pass()
        assert prefetcher.end_pass(1000.0, 0.0) is None
    assert prefetcher.is_on


def test_routers_are_asked_as_far_ahead_as_is_said_about_each_layer_once():
    model = RoutedModel(5, 8, [Block()] * 5)
    prefetcher, cache = trusted(NextRouter(model, layers_ahead=3), num_layers=5)
    assert prefetcher.expected(1).routers_ahead == 3
    for layer in range(5):
        prefetcher.see(layer, inputs(layer), torch.zeros(1, 2, dtype=torch.int64))
    assert cache.asked == [(1, [0, 1]), (2, [0, 1]), (3, [0, 1]), (4, [1, 2])]
    assert cache.asked_of_passes == []


def test_what_a_network_names_is_read_at_once_and_then_weighed_against_routers():
    model = RoutedModel(2, 8, [Block(), Block()], has_network=True)
    prefetcher, cache = trusted(CombinedPredictor(model))
    for _ in range(60):  # the network is right of the first layer alone, the router of the second
        prefetcher.begin_pass()
        prefetcher.expect(1, [[3, 4], [7, 0]])
        prefetcher.see(0, inputs(5), torch.tensor([[3, 4]]))
        prefetcher.see(1, inputs(0), torch.tensor([[5, 6]]))
    assert {3, 4} <= {*cache.asked_of_passes[-1]}
    assert sorted(cache.asked[-2][1]) == [5, 6]
    assert prefetcher.end_pass(1.0, 0.0) is None
