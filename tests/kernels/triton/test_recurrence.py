"""Linear recurrences by Triton, against float64, in passes that are cut in any way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.recurrent.recurrence import recurrence
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.state_sequences import (
    NO_STATE,
    LayerStates,
    StateSequence,
    StateSequences,
    host_table,
)
from moeflow.kernels.recurrent.state_table import StateTable
from moeflow.kernels.triton import recurrence as triton_recurrence
from tests.kernels.recurrent.passes import LENGTHS, mixed, rows_of
from tests.kernels.triton.launches import last_program_first, triton_alone
from tests.kernels.triton.tolerance import tolerance

HEADS, KEY_HEADS = 4, 2
DELTA = {"is_delta": True, "norm_eps": 1e-6, "query_scale": 0.3, "skip": None}


@pytest.fixture(autouse=True)
def _no_cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_AVAILABLE", False)


def make_layer(**changes: object) -> RecurrenceLayer:
    """Return a layer of Mamba2, but for some of its properties."""
    torch.manual_seed(5)
    plain = RecurrenceLayer(
        num_heads=HEADS,
        num_key_heads=KEY_HEADS,
        key_dim=6,
        value_dim=5,
        step_bias=torch.randn(HEADS),
        log_decay=torch.randn(HEADS),
        skip=torch.randn(HEADS),
        is_delta=False,
        norm_eps=None,
        query_scale=1.0,
    )
    return replace(plain, **changes)


def make_rows(layer: RecurrenceLayer, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what the tokens bring, in one row each, with a few values of no use at its end."""
    return torch.randn(num_tokens, sum(_sizes(layer)) + 3).to(dtype)


def given_of(layer: RecurrenceLayer, rows: torch.Tensor) -> RecurrenceInput:
    """Return the parts of the rows."""
    *qkv, steps, rates, _ = rows.split([*_sizes(layer), rows.shape[1] - sum(_sizes(layer))], dim=1)
    return RecurrenceInput(*qkv, steps, rates if layer.is_delta else None)


def _sizes(layer: RecurrenceLayer) -> list[int]:
    of_keys = layer.num_key_heads * layer.key_dim
    return [of_keys, of_keys, layer.num_heads * layer.value_dim, layer.num_heads, layer.num_heads]


def expected_of(layer: RecurrenceLayer, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the tokens of one sequence find, and the state after each, in float64."""
    given = given_of(layer, rows.double())
    steps = functional.softplus(given.steps + layer.step_bias.double()).clamp(layer.least_step, layer.most_step)
    rates = steps if given.rates is None else given.rates.sigmoid()
    out, states = [], []
    state = torch.zeros(layer.num_heads, layer.key_dim, layer.value_dim, dtype=torch.float64)
    for token in range(len(rows)):
        found = []
        state = state.clone()
        for head in range(layer.num_heads):
            at = head % KEY_HEADS if layer.key_heads_take_turns else head * KEY_HEADS // HEADS
            query, key = (x[token].view(KEY_HEADS, -1)[at] for x in (given.queries, given.keys))
            if layer.norm_eps is not None:
                query, key = (x / (x @ x + layer.norm_eps).sqrt() for x in (query, key))
            value = given.values[token].view(layer.num_heads, -1)[head]
            state[head] *= torch.exp(-torch.exp(layer.log_decay[head].double()) * steps[token, head])
            added = value - key @ state[head] if layer.is_delta else value
            state[head] += torch.outer(key, rates[token, head] * added)
            skipped = 0.0 if layer.skip is None else layer.skip[head].double() * value
            found.append(layer.query_scale * query @ state[head] + skipped)
        out.append(torch.cat(found))
        states.append(state.flatten())
    return torch.stack(out), torch.stack(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, DELTA], ids=["plain", "delta"])
def test_what_tokens_find_is_float64s(changes: dict[str, object], dtype: torch.dtype) -> None:
    layer = make_layer(**changes)
    rows = make_rows(layer, sum(LENGTHS), dtype)
    want = torch.cat([expected_of(layer, rows[list(rows_of(number))])[0] for number in range(len(LENGTHS))])
    with triton_alone(triton_recurrence) as started:
        found = mixed(lambda x, *where: recurrence(layer, given_of(layer, x), *where), rows, layer.state_values)
    assert len(started) == 3  # passes
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), want, **tolerance(dtype))


@pytest.mark.parametrize(
    "changes",
    [
        {"key_dim": 9, "value_dim": 21},
        {"key_dim": 16, "value_dim": 32, **DELTA, "skip": torch.ones(HEADS)},
        {"key_heads_take_turns": True, **DELTA},
        {"key_heads_take_turns": True, "skip": None, "least_step": 0.7, "most_step": 0.9},
    ],
)
def test_every_kind_of_layer_stores_states_and_reads_them(changes: dict[str, object]) -> None:
    layer = make_layer(**changes)
    rows = make_rows(layer, 6, torch.float32)
    slots = torch.full((4, layer.state_values + 3), torch.nan)
    first, second = expected_of(layer, rows[:4]), expected_of(layer, rows[4:])
    with triton_alone(triton_recurrence):
        states = LayerStates(slots, offset=3)
        passes = ([(0, 2, NO_STATE, 0, [(1, 1), (2, 2)]), (2, 2, NO_STATE, 3, [])], [(0, 2, 2, 2, [])])
        found = []
        for places, parts in zip(([0, 1, 4, 5], [2, 3]), passes, strict=True):
            sequences = StateSequences([StateSequence(*part) for part in parts])
            found.append(recurrence(layer, given_of(layer, rows[places]), states, sequences))
    want = torch.cat([first[0][:2], second[0], first[0][2:]])
    torch.testing.assert_close(torch.cat(found).double(), want, **tolerance(torch.float32))
    kept = torch.stack([first[1][1], first[1][0], first[1][3], second[1][1]])
    torch.testing.assert_close(slots[:, 3:].double(), kept, **tolerance(torch.float32))
    assert slots[:, :3].isnan().all()


def test_a_sequence_waits_for_one_of_the_same_pass_that_stores_its_state() -> None:
    layer = make_layer(**DELTA)
    rows = make_rows(layer, 5, torch.float32)
    states = LayerStates(torch.full((3, layer.state_values), torch.nan))
    sequences = StateSequences([StateSequence(0, 3, NO_STATE, 0, [(2, 1)]), StateSequence(3, 2, 1, 2)])
    with triton_alone(), last_program_first():
        found = recurrence(layer, given_of(layer, rows), states, sequences)
    want = expected_of(layer, rows[[0, 1, 3, 4]])[0][2:]
    torch.testing.assert_close(found[3:].double(), want, **tolerance(torch.float32))


def test_rows_of_padding_store_nothing() -> None:
    layer = make_layer(**DELTA)
    rows = make_rows(layer, 4, torch.float32)
    slots = torch.randn(3, layer.state_values)
    before = slots.clone()
    # The second stores nothing, the third has no tokens.
    sequences = torch.tensor(
        [[0, 1, 0, 3], [1, 1, -1, -1], [0, 1, 2, 2], [1, 2, 2, 3], [1, 2, 3, 4]], dtype=torch.int32
    )
    stores = torch.tensor([[1, 1, 1], [1, -1, 2]], dtype=torch.int32)
    given = StateSequences((), StateTable(sequences, stores, 1))
    alone = StateSequences([StateSequence(0, 1, 1, 1), StateSequence(3, 1, NO_STATE, 2)])
    with triton_alone():
        found = recurrence(layer, given_of(layer, rows), LayerStates(slots), given)
        want = recurrence(layer, given_of(layer, rows), LayerStates(before), alone)
    assert found[1].isfinite().all()
    assert torch.equal(found[[0, 3]], want[[0, 3]])
    assert torch.equal(slots, before)


@pytest.mark.parametrize("x", [-90.0, -20.0, -3.0, -1e-3, 0.0, 0.5, 19.0, 25.0, 300.0])
def test_small_steps_are_as_exact_as_large_ones(x: float) -> None:
    layer = make_layer(step_bias=torch.zeros(HEADS), log_decay=torch.full((HEADS,), -99.0), skip=None)
    rows = torch.ones(1, sum(_sizes(layer)))
    rows[:, -2 * HEADS :] = x
    with triton_alone():
        states = LayerStates(torch.zeros(1, layer.state_values))
        found = recurrence(layer, given_of(layer, rows), states, StateSequences([StateSequence(0, 1, NO_STATE, 0)]))
    want = layer.key_dim * (x if x > 100 else math.log1p(math.exp(x)))
    torch.testing.assert_close(found, torch.full_like(found, want), rtol=3e-6, atol=1e-37)


def test_a_chain_has_the_sequences_that_start_from_states_of_the_same_pass() -> None:
    sequences = [
        StateSequence(0, 4, NO_STATE, 7, [(2, 5)]),
        StateSequence(4, 1, 3, 3),
        StateSequence(5, 2, 5, 6, [(1, 8)]),
        StateSequence(7, 9, 3 + 1, 9),
        StateSequence(16, 3, 8, 2),
    ]
    found, stores = host_table(sequences)
    assert found.T.tolist() == [
        [0, NO_STATE, 0, 2, 3],
        [5, 5, 2, 4, 0],
        [16, 8, 4, 5, 0],
        [4, 3, 5, 6, 4],
        [7, 4, 6, 7, 5],
    ]
    assert stores.T.tolist() == [[2, 5], [4, 7], [1, 8], [2, 6], [3, 2], [1, 3], [9, 9]]
