"""What is read ahead: the predictor's guesses, for passes of few tokens, as long as the governor lets it."""

from __future__ import annotations

import torch

from moeflow.experts.predict.governor import Governor
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor
from moeflow.experts.prefetcher import Prefetcher
from moeflow.kernels.cpu.decoder import NOTHING


class Cache:
    num_experts = 4

    def __init__(self):
        self.asked = []

    def prefetch(self, layer, experts):
        self.asked.append((layer, list(experts)))


class Block:
    """Sends every token to the expert that its input names, and to the one after it."""

    def route(self, hidden):
        first = hidden[:, :1].long()
        return torch.cat([first, first + 1], dim=1), torch.ones(len(hidden), 2)


MODEL = RoutedModel(2, 8, [Block(), Block()])


def trusted(predictor):
    """Return a prefetcher after passes that took half the time with prefetches."""
    cache = Cache()
    prefetcher = Prefetcher(cache, predictor, Governor("guess"), 2)
    for _ in range(20):
        prefetcher.expected(1)
        prefetcher.end_pass(0.5 if prefetcher.is_on else 1.0)
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
    assert cache.asked == [(1, [5, 6, 4]), (0, [])]


def test_a_pass_of_many_tokens_reads_nothing_ahead():
    prefetcher, cache = trusted(NextRouter(MODEL))
    prefetcher.see(0, inputs(*range(9)), torch.zeros(9, 2, dtype=torch.int64))
    assert cache.asked == []


def test_a_predictor_that_does_not_pay_is_switched_off_and_that_is_said():
    cache = Cache()
    prefetcher = Prefetcher(cache, NextRouter(MODEL), Governor("guess"), 2)
    said = []
    for _ in range(20):
        assert prefetcher.expected(1).by_next_router == prefetcher.is_on
        said.append(prefetcher.end_pass(2.0 if prefetcher.is_on else 1.0))
    assert not prefetcher.is_on
    assert [each for each in said if each] == [prefetcher.note]
    assert "more time" in prefetcher.note
    prefetcher.see(0, inputs(4), torch.zeros(1, 2, dtype=torch.int64))
    assert cache.asked == []
    assert prefetcher.expected(1) == NOTHING


def test_passes_that_lack_nothing_and_large_ones_are_not_judged():
    prefetcher, _ = trusted(NextRouter(MODEL))
    for number in range(2000):
        if number % 2:
            assert prefetcher.expected(9) == NOTHING
        assert prefetcher.end_pass(1000.0) is None
    assert prefetcher.is_on


def test_what_does_not_depend_on_the_pass_is_expected_of_all_layers_at_once():
    prefetcher, cache = trusted(PreviousTokenPredictor(MODEL))
    prefetcher.expected(1)
    prefetcher.see_hits(0, torch.tensor([[[1, 3]], [[0, 2]]]))
    assert cache.asked == [(0, [1, 3])]  # for the next pass
    assert prefetcher.expected(1).guesses.tolist() == [[0, 1, 0, 1], [1, 0, 1, 0]]


def test_what_a_model_that_guesses_lacked_is_not_the_passs():
    prefetcher, _ = trusted(NextRouter(MODEL))
    for _ in range(2000):
        prefetcher.expected(1)  # the first layers, computed before the pass
        prefetcher.begin_pass()
        assert prefetcher.end_pass(1000.0) is None
    assert prefetcher.is_on
