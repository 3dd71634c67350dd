"""The prefetch driver: it prefetches what sources and drafts rank, while passes are faster for it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch

from moeflow.core.trial import Trial
from moeflow.experts.predict.combined import CombinedPredictor
from moeflow.experts.predict.next_router import NextRouter
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor
from moeflow.experts.prefetch.driver import PrefetchDriver
from moeflow.experts.prefetch.layer_source import LayerSource
from moeflow.experts.prefetch.network_source import NetworkSource
from moeflow.kernels.cpu.decoder import NOTHING

EXPERTS = 8


@dataclass
class Pass:
    num_tokens: int = 1


class Block:
    """Sends every token to the expert that its input names, and to the one after it."""

    def route(self, hidden):
        first = hidden[:, :1].long()
        return torch.cat([first, first + 1], dim=1), torch.ones(len(hidden), 2)


MODEL = RoutedModel(2, EXPERTS, [Block(), Block()])


class Machine:
    """Passes on a virtual clock, and a cache that records prefetches."""

    def __init__(self, *sources):
        self.now_s = 0.0
        self.has_absent, self.stall_s = True, 0.0
        self.of_layers, self.of_passes = [], []
        self.driver = PrefetchDriver(self, sources, lambda: self.now_s)

    def prefetch_pass(self, numbers):
        self.of_passes.append(numbers)

    def prefetch(self, layer, experts):
        self.of_layers.append((layer, list(experts)))

    def run(self, seconds, num_tokens=1, *, drafting_s=None, drafted=frozenset({7, 3})):
        if drafting_s is not None:
            self.driver.begin_drafting()
            self.now_s += drafting_s
            self.driver.begin_drafting()  # a second draft model
            self.driver.expect_drafted(drafted)
        self.driver.begin_pass(Pass(num_tokens))
        self.now_s += seconds
        self.driver.end_pass(num_tokens)


def by_layers(predictor, network=None):
    return LayerSource(Trial("a predictor"), EXPERTS, predictor, network)


def trusted(source):
    """Return a machine after passes that took half the time with prefetches."""
    machine = Machine(source)
    for _ in range(100):
        machine.run(0.5 if source.trial.is_on else 1.0)
    assert source.trial.is_on
    machine.of_layers.clear()
    machine.of_passes.clear()
    return machine


def inputs(*experts):
    return torch.tensor([[float(expert), 0.0] for expert in experts])


def choices(num_tokens):
    return torch.zeros(num_tokens, 2, dtype=torch.int64)


def test_the_next_layers_router_is_asked_and_the_commonest_come_first():
    machine = trusted(by_layers(NextRouter(MODEL)))
    machine.driver.see(0, inputs(4, 5, 5), choices(3))
    machine.driver.see(1, inputs(1, 1, 1), choices(3))
    assert machine.of_layers == [(1, [5, 6, 4])]


def test_a_pass_of_many_tokens_prefetches_nothing():
    machine = trusted(by_layers(NextRouter(MODEL)))
    machine.driver.see(0, inputs(*range(9)), choices(9))
    assert machine.of_layers == []
    assert machine.driver.expected(9) == NOTHING


def test_a_source_that_does_not_pay_is_switched_off_and_a_message_reports_it(caplog):
    source = by_layers(NextRouter(MODEL))
    machine = Machine(source)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            assert machine.driver.expected(1).routers_ahead == source.trial.is_on
            machine.run(2.0 if source.trial.is_on else 1.0)
    assert not source.trial.is_on
    assert caplog.messages == [f"a predictor: switched off, {source.trial.reason}"]
    assert "more time" in source.trial.reason
    machine.driver.see(0, inputs(4), choices(1))
    assert machine.of_layers == []
    assert machine.driver.expected(1) == NOTHING


def test_passes_with_all_experts_resident_and_large_ones_are_not_judged():
    source = by_layers(NextRouter(MODEL))
    machine = trusted(source)
    for number in range(2000):
        machine.has_absent = number % 2 == 0
        machine.run(1000.0, num_tokens=9 if machine.has_absent else 1)
    assert source.trial.is_on


def test_predictions_from_the_past_are_expected_of_all_layers_at_once():
    machine = trusted(by_layers(PreviousTokenPredictor(MODEL)))
    machine.driver.see_hits(0, torch.tensor([[[1, 3]]]))
    assert machine.of_layers == []  # kernels run the next layer already
    machine.driver.see_hits(1, torch.tensor([[[0, 2]]]))
    assert machine.of_layers == [(0, [1, 3])]  # for the next pass
    assert machine.driver.expected(1).predicted.tolist() == [[0, 1, 0, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0, 0, 0]]


def test_routers_are_asked_as_far_ahead_as_configured_about_each_layer_once():
    machine = trusted(by_layers(NextRouter(RoutedModel(5, EXPERTS, [Block()] * 5), layers_ahead=3)))
    assert machine.driver.expected(1).routers_ahead == 3
    for layer in range(5):
        machine.driver.see(layer, inputs(layer), choices(1))
    assert machine.of_layers == [(1, [0, 1]), (2, [0, 1]), (3, [0, 1]), (4, [1, 2])]
    assert machine.of_passes == []


def test_a_network_is_prefetched_for_at_once_and_then_weighed_against_routers():
    model = RoutedModel(2, EXPERTS, [Block(), Block()], has_network=True)
    source = by_layers(CombinedPredictor(model), lambda _: [[3, 4], [7, 0]])
    source.trial.is_on, source.trial.end_pass = True, lambda *_: None
    machine = Machine(source)
    for _ in range(60):  # the network is right of the first layer alone, the router of the second
        machine.driver.begin_pass(Pass())
        machine.driver.see(0, inputs(5), torch.tensor([[3, 4]]))
        machine.driver.see(1, inputs(0), torch.tensor([[5, 6]]))
        machine.driver.end_pass(1)
    assert {3, 4} <= {*machine.of_passes[-1]}
    assert sorted(machine.of_layers[-2][1]) == [5, 6]


def test_a_networks_experts_are_numbered_from_its_first_layer():
    source = NetworkSource(Trial("a network", starts_on=True), EXPERTS, lambda _: [[3, 4], [7, 0]], first_layer=2)
    machine = Machine(source)
    machine.run(1.0)
    assert machine.of_passes == [[19, 20, 31, 24]]
    machine.run(1.0, num_tokens=9)
    assert len(machine.of_passes) == 1


def drafting_machine(gain, loss):
    """Return a machine, and a function that runs a pass with drafts, which prefetches make faster or slower."""
    machine = Machine(by_layers(NextRouter(MODEL)))

    def run():
        is_on = machine.driver.draft_trial.is_on
        machine.run(1 - gain if is_on else 1.0, drafting_s=0.1 + (loss if is_on else 0.0))

    return machine, run


def test_drafts_are_prefetched_for_in_the_order_of_layers():
    machine, run = drafting_machine(0.5, 0.0)
    for _ in range(60):
        run()
    assert machine.driver.draft_trial.is_on
    assert "less time" in machine.driver.draft_trial.reason
    machine.of_passes.clear()
    run()
    assert machine.of_passes == [[3, 7]]


@pytest.mark.parametrize(("gain", "loss"), [(-0.5, 0.0), (0.0, 0.0), (0.5, 0.6)])
def test_drafts_are_not_followed_where_passes_with_drafting_are_not_faster(gain, loss):
    machine, run = drafting_machine(gain, loss)
    for _ in range(600):
        run()
    assert not machine.driver.draft_trial.is_on
    machine.of_passes.clear()
    for _ in range(100):
        run()
    assert machine.of_passes == []


def test_a_pass_with_drafts_is_judged_for_them_alone_and_a_failed_one_for_nothing():
    judged = []

    class Noted(Trial):
        def end_pass(self, num_tokens, seconds, waited_s):
            judged.append((self, seconds))

    source = NetworkSource(Noted("a network", starts_on=True), EXPERTS, lambda _: [[1], [2]])
    machine = Machine(source)
    drafts = machine.driver.draft_trial = Noted("drafts", starts_on=True)
    machine.run(1.0, drafting_s=0.5)
    assert judged == [(drafts, 1.5)]
    assert machine.of_passes == [[3, 7]]
    machine.driver.begin_drafting()
    machine.now_s += 1000.0
    machine.driver.drop_pass()
    assert not machine.driver.has_drafts
    machine.run(2.0)
    assert judged[1:] == [(source.trial, 2.0)]
    assert machine.of_passes[1:] == [[1, 10]]


def test_without_sources_nothing_is_on():
    machine = Machine()
    assert not machine.driver.is_on
    machine.run(1.0)
    machine.driver.see(0, inputs(1), choices(1))
    machine.driver.see_hits(0, torch.zeros(2, 1, 2, dtype=torch.int64))
    assert (machine.of_layers, machine.of_passes, machine.driver.trials) == ([], [], [])
