"""Linear recurrences in chunks by Triton, against float64 token by token."""

from __future__ import annotations

import pytest
import torch

from moeflow.kernels.recurrent import recurrence as public
from moeflow.kernels.recurrent.state_sequences import NO_STATE, LayerStates, StateSequence, StateSequences
from moeflow.kernels.recurrent.state_table import CHUNK_TOKENS
from moeflow.kernels.triton import chunked_recurrence, launching
from moeflow.kernels.triton.chunked_recurrence import recurrence, suits
from tests.kernels.triton.launches import last_program_first, triton_alone
from tests.kernels.triton.test_recurrence import DELTA, HEADS, expected_of, given_of, make_layer, make_rows
from tests.kernels.triton.tolerance import tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, DELTA], ids=["plain", "delta"])
def test_prompts_in_chunks_store_the_states_of_tokens_one_by_one(
    changes: dict[str, object], dtype: torch.dtype
) -> None:
    """A prompt of three chunks stores a checkpoint within one. A short sequence and one without tokens share the pass.

    Another one starts from the checkpoint.
    """
    layer = make_layer(**changes)
    rows = make_rows(layer, 77 + 3 + 40, dtype)
    slots = torch.full((5, layer.state_values + 3), torch.nan)
    parts = [(0, 77, NO_STATE, 0, [(20, 1), (64, 2)]), (77, 3, NO_STATE, 3, []), (80, 40, 1, 4, [])]
    with triton_alone(chunked_recurrence) as started, last_program_first():
        sequences = StateSequences([StateSequence(*part) for part in parts])
        found = recurrence(layer, given_of(layer, rows), LayerStates(slots, offset=3), sequences)
    assert len(started) == 2
    first, second = expected_of(layer, rows[:77]), expected_of(layer, rows[77:80])
    third = expected_of(layer, torch.cat([rows[:20], rows[80:]]))
    assert found.dtype is dtype
    want = torch.cat([first[0], second[0], third[0][20:]])
    torch.testing.assert_close(found.double(), want, **tolerance(dtype))
    kept = torch.stack([first[1][76], first[1][19], first[1][63], second[1][2], third[1][-1]])
    torch.testing.assert_close(slots[:, 3:].double(), kept, **_of_states(dtype))
    assert slots[:, :3].isnan().all()


def _of_states(dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance of states: float32, from inputs of another type that expectations begin with, too."""
    return tolerance(torch.float32) if dtype is torch.float32 else {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(
    "changes",
    [
        {"key_dim": 9, "value_dim": 37},
        {"key_dim": 16, "value_dim": 32, **DELTA, "skip": torch.ones(HEADS)},
        {"key_heads_take_turns": True, **DELTA},
        {"key_heads_take_turns": True, "skip": None, "least_step": 0.7, "most_step": 0.9},
    ],
)
def test_every_kind_of_layer(changes: dict[str, object]) -> None:
    layer = make_layer(**changes)
    rows = make_rows(layer, CHUNK_TOKENS + 5, torch.float32)
    with triton_alone():
        states = LayerStates(torch.zeros(1, layer.state_values))
        sequences = StateSequences([StateSequence(0, len(rows), NO_STATE, 0)])
        found = recurrence(layer, given_of(layer, rows), states, sequences)
    want, kept = expected_of(layer, rows)
    torch.testing.assert_close(found.double(), want, **tolerance(torch.float32))
    torch.testing.assert_close(states.slots[0].double(), kept[-1], **tolerance(torch.float32))


@pytest.mark.parametrize(("log_decay", "rate"), [(-99.0, 30.0), (4.0, 0.0)], ids=["nothing fades", "all fades"])
def test_keys_that_are_all_the_same(log_decay: float, rate: float) -> None:
    """Each value then replaces the one before it. Powers of the matrix that is inverted reach 10^8 here."""
    layer = make_layer(**DELTA, log_decay=torch.full((HEADS,), log_decay))
    rows = make_rows(layer, 3 * CHUNK_TOKENS, torch.float32)
    of_keys = layer.num_key_heads * layer.key_dim
    rows[:, of_keys : 2 * of_keys] = 1.0
    given = given_of(layer, rows)
    assert given.rates is not None
    given.rates.fill_(rate)
    with triton_alone():
        states = LayerStates(torch.zeros(1, layer.state_values))
        sequences = StateSequences([StateSequence(0, len(rows), NO_STATE, 0)])
        found = recurrence(layer, given, states, sequences)
    want, _ = expected_of(layer, rows)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


def test_chunks_end_where_states_are_stored() -> None:
    parts = [StateSequence(0, 70, NO_STATE, 0, [(16, 1), (64, 2)]), StateSequence(70, 1, 3, 3)]
    table = StateSequences(parts).table_on(torch.device("cpu"))
    assert table.chunks is not None
    assert table.chunks.T.tolist() == [[0, 16], [16, 32], [48, 16], [64, 6], [70, 1]]


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "capability", "is_chunked"),
    [
        (CHUNK_TOKENS, torch.bfloat16, 80, True),
        (CHUNK_TOKENS, torch.float16, 90, True),
        (CHUNK_TOKENS - 1, torch.bfloat16, 90, False),
        (CHUNK_TOKENS, torch.float32, 90, False),
        (CHUNK_TOKENS, torch.float16, 75, False),
    ],
)
def test_long_prompts_in_16_bits_are_computed_in_chunks(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, dtype: torch.dtype, capability: int, is_chunked: bool
) -> None:
    monkeypatch.setattr(chunked_recurrence, "gpu_of", lambda _: launching.GPU(capability, 40))
    monkeypatch.setattr(public.cpu, "_AVAILABLE", False)
    layer = make_layer(**DELTA)
    rows = make_rows(layer, num_tokens, dtype)
    sequences = StateSequences([StateSequence(0, num_tokens, NO_STATE, 0)])
    assert suits(rows, sequences) == is_chunked
    with triton_alone(chunked_recurrence) as started:
        public.recurrence(layer, given_of(layer, rows), LayerStates(torch.zeros(1, layer.state_values)), sequences)
    assert len(started) == (2 if is_chunked else 0)
