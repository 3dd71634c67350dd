"""Several predictors as one: the weights learnt for each, against traffic with a known rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from moeflow.experts.predict.combined import MIN_CHANCE, CombinedPredictor
from moeflow.experts.predict.frequency import FrequencyPredictor
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.previous_token import PreviousTokenPredictor

NUM_EXPERTS, TOP_K = 24, 4


def repeated(chance):
    """Yield passes that take each expert from the pass before with some chance, else any."""
    rng = random.Random(1)
    last = rng.sample(range(NUM_EXPERTS), TOP_K)
    while True:
        kept = [expert for expert in last if rng.random() < chance]
        others = [expert for expert in range(NUM_EXPERTS) if expert not in kept]
        last = kept + rng.sample(others, TOP_K - len(kept))
        yield last


def popular(num_popular):
    """Yield passes of a few experts that are used all the time, never the same in two passes running."""
    rng = random.Random(2)
    halves = [list(range(num_popular)), list(range(num_popular, 2 * num_popular))]
    while True:
        for half in halves:
            yield rng.sample(half, TOP_K)


def run(predictor, traffic, num_passes, warm_up=300):
    """Return how many experts were named a pass, and which share of these and of those needed was right."""
    named = right = needed = 0
    for number, ids in zip(range(num_passes), traffic, strict=False):
        drafts = predictor.predict(0)
        predictor.observe(0, ids)
        if number >= warm_up:
            named, right, needed = named + len(drafts), right + len({*drafts} & {*ids}), needed + TOP_K
    return named / (num_passes - warm_up), right / max(named, 1), right / needed


def test_text_that_repeats_itself_is_told_by_the_pass_before():
    named, precision, recall = run(CombinedPredictor(RoutedModel(1, NUM_EXPERTS)), repeated(0.8), 1500)
    assert named == pytest.approx(TOP_K, abs=0.2)
    assert precision == pytest.approx(0.83, abs=0.03)  # 0.8, and a sixth of the new draws
    assert recall == pytest.approx(0.83, abs=0.03)


def test_text_that_never_repeats_is_told_by_frequency():
    model = RoutedModel(1, NUM_EXPERTS)
    named, precision, _ = run(CombinedPredictor(model), popular(5), 1500)
    assert named == pytest.approx(5, abs=1)  # and hardly those of the pass before
    assert precision > 0.6
    assert run(PreviousTokenPredictor(model), popular(5), 1500)[1] == 0
    assert run(FrequencyPredictor(model), popular(5), 1500)[1] == pytest.approx(0.4, abs=0.02)


def test_what_cannot_be_known_is_not_named():
    rng = random.Random(3)
    anything = iter(lambda: rng.sample(range(NUM_EXPERTS), TOP_K), None)
    named, _, _ = run(CombinedPredictor(RoutedModel(1, NUM_EXPERTS)), anything, 1500)
    assert TOP_K / NUM_EXPERTS < MIN_CHANCE
    assert named < 0.5


class Router:
    """Chooses what an input says, by its first numbers."""

    def route(self, hidden):
        return hidden[:, :TOP_K].long(), hidden[:, :TOP_K]


def test_a_router_that_has_been_asked_counts_most_and_only_then():
    rng = random.Random(4)
    predictor = CombinedPredictor(RoutedModel(2, NUM_EXPERTS, (Router(), Router())))
    told, untold = [], []
    for number in range(900):
        ids = [rng.sample(range(NUM_EXPERTS), TOP_K) for _ in range(2)]
        predictor.observe(0, ids[0])
        is_told = number % 3 > 0
        if is_told:
            predictor.observe_input(0, torch.tensor([[*map(float, ids[1])]]))
        drafts = predictor.predict(1)
        predictor.observe(1, ids[1])
        if number > 600:
            (told if is_told else untold).append((set(drafts), set(ids[1])))
    assert all(drafts == ids for drafts, ids in told)
    assert np.mean([len(drafts) for drafts, _ in untold]) < 1


def test_what_is_said_twice_counts_once():
    model = RoutedModel(1, NUM_EXPERTS)
    predictor = CombinedPredictor(model)
    predictor._members = [PreviousTokenPredictor(model), PreviousTokenPredictor(model)]
    traffic = repeated(0.5)
    chances = []
    for number, ids in zip(range(4000), traffic, strict=False):
        predictor.predict(0)
        if number > 2000:
            named = predictor._members[0].predict(0)
            chances += [predictor._predicted[0].chances[expert] for expert in named]
        predictor.observe(0, ids)
    assert np.mean(chances) == pytest.approx(0.5 + 0.5 * 0.1, abs=0.08)
