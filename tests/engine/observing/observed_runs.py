"""Runs of an engine that is observed, and what it has seen as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import Submission
from moeflow.core.observation import (
    NOT_COMPUTED,
    ExpertQuestion,
    ExpertSight,
    RequestQuestion,
    RoutedTokens,
    TokenQuestion,
    Watch,
)
from moeflow.engine.engine import Engine
from tests.engine.submissions import run, tokens

Routes = NDArray[np.uint16]


class Seen(NamedTuple):
    """What one run has shown."""

    tokens: dict[str, list[int]]  # of each answer
    sight: ExpertSight
    routes: dict[str, Routes]  # of each request: [P, L, K]
    counts: dict[str, NDArray[np.int64]]  # of each request: [L, E]


def observed_run(config: EngineConfig, submissions: Sequence[Submission]) -> Seen:
    """Return what an engine has seen of these requests."""
    with closing(Engine.load(config)) as engine:
        return observe(engine, submissions)


def plain_run(config: EngineConfig, submissions: Sequence[Submission]) -> dict[str, list[int]]:
    """Return the tokens of these requests in an unobserved engine."""
    with closing(Engine.load(config)) as engine:
        return answers_of(engine, submissions)


def observe(engine: Engine, submissions: Sequence[Submission]) -> Seen:
    """Return what this engine sees of these requests."""
    engine.look(Watch())
    return seen_by(engine, answers_of(engine, submissions))


def answers_of(engine: Engine, submissions: Sequence[Submission]) -> dict[str, list[int]]:
    """Return the tokens of these requests."""
    for submission in submissions:
        engine.submit(submission)
    return {name: tokens(outputs) for name, outputs in run(engine).items()}


def seen_by(engine: Engine, answers: dict[str, list[int]]) -> Seen:
    """Return what this engine has seen of requests with these answers."""
    sight = engine.look(ExpertQuestion())
    assert isinstance(sight, ExpertSight)
    return Seen(
        answers,
        sight,
        {name: routes_of(engine, name) for name in answers},
        {name: counts_of(engine, name) for name in answers},
    )


def routes_of(engine: Engine, name: str) -> Routes:
    """Return the experts of a request's tokens."""
    sight = engine.look(TokenQuestion(name))
    found = {one.sequence_id: one for one in sight.sequences}
    one = found[name]
    shape = (len(one.token_ids), len(sight.layers), sight.top_k)
    return np.frombuffer(one.experts, "<u2").reshape(shape)


def counts_of(engine: Engine, name: str) -> NDArray[np.int64]:
    """Return how many of a request's tokens each expert got."""
    sight = engine.look(RequestQuestion(name))
    found = {one.sequence_id: one for one in sight.sequences}
    return np.frombuffer(found[name].counts, "<i8").reshape(len(sight.layers), sight.num_experts)


def table(routed: RoutedTokens, sight: ExpertSight) -> NDArray[np.int64]:
    """Return the counts of experts, [L, E]."""
    return np.frombuffer(routed.counts, "<i8").reshape(len(sight.layers), sight.num_experts)


def counted(choices: Iterable[NDArray[np.integer]], num_experts: int) -> NDArray[np.int64]:
    """Count choices by another way: [L, tokens, K] each -> [L, E]."""
    found = [[[int((layer == expert).sum()) for expert in range(num_experts)] for layer in each] for each in choices]
    return np.sum(found, axis=0)


def computed(routes: Routes) -> NDArray[np.bool_]:
    """Return which positions were computed in all layers."""
    return (routes != NOT_COMPUTED).all(axis=(1, 2))


def check_sums(sight: ExpertSight) -> None:
    """Check that a layer's counts add up to its tokens times the experts of each."""
    for routed in (sight.total, sight.last_pass, sight.last_minute):
        sums = table(routed, sight).sum(axis=1)
        assert sums.tolist() == [number * sight.top_k for number in routed.tokens_of_layers]
    assert sight.not_counted == ""
