"""Kernels of sampling: the likeliest tokens, changes of logits, and log-probabilities."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from moeflow.kernels import device_sample
from moeflow.kernels.logit_edits import LogitEdits, edited
from moeflow.kernels.triton import draws, greedy, logit_edits
from tests.kernels.triton.launches import triton_alone

INF = math.inf


@pytest.mark.parametrize("size", [1, 7, 16384, 40000])
def test_the_first_of_the_likeliest_is_taken_in_one_launch(size: int) -> None:
    torch.manual_seed(size)
    logits = (torch.randn(3, size + 5).round() - 2.0)[:, :size]  # parts of longer rows, with equal numbers
    with triton_alone(greedy) as started:
        found = greedy.greedy(logits)
    assert len(started) == 1
    assert found.tolist() == [row.index(max(row)) for row in logits.tolist()]


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("place", [0, 17000, 39999])
def test_a_row_with_a_bad_number_has_no_token(bad: float, place: int) -> None:
    logits = torch.zeros(3, 40000)
    logits[0, 30000] = 1.0
    logits[1, place] = bad
    logits[2] = -INF
    assert greedy.greedy(logits).tolist() == [30000, -1, -1]


def test_a_kernels_changes_of_logits_are_numpys() -> None:
    rng = np.random.default_rng(3)
    size = 5003  # two blocks of a row, and no whole bytes of a mask
    logits = torch.randn(4, size + 9)[:, :size]
    places = [np.sort(rng.choice(size, number, replace=False)) for number in (300, 0, 41)]
    numbers = np.repeat(np.arange(3), [len(tokens) for tokens in places])
    amounts = rng.normal(size=(3, 341)).astype(np.float32)
    amounts[1] = np.abs(amounts[1]) + 0.1
    amounts[0, ::50] = -INF
    edits = LogitEdits(
        rows=np.array([3, 0, 2], np.int32),
        places=np.stack([numbers, np.concatenate(places)]).astype(np.int32),
        amounts=amounts,
        mask_of=np.array([-1, 1, 0], np.int32),
        masks=rng.integers(0, 256, (2, (size + 7) // 8), np.uint8),
    )
    want = edited(logits, edits)
    assert _expected(logits.numpy(), edits) == want.tolist()
    with triton_alone(logit_edits) as started:
        assert np.array_equal(logit_edits.edited(logits, edits).numpy(), want)
    assert len(started) == 2


def _expected(logits: Any, edits: LogitEdits) -> list[list[float]]:
    """Return changed rows, a number after another."""
    out = [[np.float32(x) for x in logits[row]] for row in edits.rows]
    for (number, token), (bias, penalty, loss) in zip(edits.places.T, edits.amounts.T, strict=True):
        x = out[number][token] + bias
        out[number][token] = (x / penalty if x > 0 else x * penalty) - loss
    for row, mask in zip(out, edits.mask_of, strict=True):
        if mask >= 0:
            for token in range(len(row)):
                if not edits.masks[mask][token // 8] >> (token % 8) & 1:
                    row[token] = np.float32(-INF)
    return [[float(x) for x in row] for row in out]


def make_table(*samplings: tuple[int, float, int, float, float, float]) -> torch.Tensor:
    return torch.tensor(samplings, dtype=torch.float64)


def test_a_drawn_token_depends_on_its_row_alone() -> None:
    torch.manual_seed(2)
    logits = torch.randn(3, 5000)
    table = make_table(
        *((2, 1.0, 0, 1.0, 1.3e-38, 0.4), (0, 0.7, 0, 1.0, 0.2, 0.9)),
        *((1, 1.0, 40, 1.0, 1.3e-38, 0.4), (0, 1.3, 0, 0.9, 1.3e-38, 0.5), (2, 1.0, 64, 0.5, 0.1, 0.999)),
    )
    with triton_alone(draws) as started:
        together = draws.draw(logits, table, 2, 4096)
    assert len(started) == 4
    alone = [draws.draw(logits, row[None], int(place < 2), 4096) for place, row in enumerate(table)]
    assert together.tolist() == [token.item() for token in alone]


def test_a_nucleus_that_is_wider_is_not_drawn_from() -> None:
    table = make_table((0, 1.0, 0, 0.5, 1.3e-38, 0.0), (0, 1.0, 0, 0.6, 1.3e-38, 0.0), (0, 1.0, 3, 0.9, 1.3e-38, 0.9))
    assert draws.draw(torch.zeros(1, 100), table, 0, 55).tolist() == [0, draws.WIDE, 2]


@pytest.mark.parametrize("size", [3, 20, 700])
def test_log_probabilities_and_ranks_are_float64s(size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(4, size).mul(2).round() / 2  # many are equal, and zeros of both signs are
    logits[1] = -INF
    logits[1, 1] = 4.0
    tokens = torch.tensor([0, 1, 2, size - 1])
    found = device_sample.logprobs(logits, tokens, 20)
    assert found.shape == (4, 2 + 2 * min(20, size))
    want = logits.double().log_softmax(dim=1)
    for row, token, x, logprobs in zip(found, tokens.tolist(), logits, want, strict=True):
        order = sorted(range(size), key=lambda each, x=x: (-x[each].item(), each))[:20]
        assert row[0].item() == pytest.approx(logprobs[token].item(), abs=1e-12)
        assert row[1].item() == (x > x[token]).sum().item() + 1
        assert row[2 : 2 + len(order)].tolist() == order
        assert row[2 + len(order) :].tolist() == pytest.approx(logprobs[order].tolist(), abs=1e-12)
