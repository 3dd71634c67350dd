"""Passes of operations with states: sequences whole and alone, and the same cut and mixed."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moeflow.kernels.recurrent.state_sequences import NO_STATE, LayerStates, StateSequence, StateSequences

LENGTHS = (9, 1, 14)
Run = Callable[[torch.Tensor, LayerStates, StateSequences], torch.Tensor]  # rows of the inputs -> rows


def rows_of(number: int) -> range:
    """Return which rows of all inputs are a sequence's."""
    return range(sum(LENGTHS[:number]), sum(LENGTHS[: number + 1]))


def alone(run: Run, inputs: torch.Tensor, num_values: int) -> torch.Tensor:
    """Return what each sequence gets token by token, by itself: [T, ..]."""
    parts = []
    for number in range(len(LENGTHS)):
        states = LayerStates(torch.full((1, num_values), torch.nan))
        for row in rows_of(number):
            source = 0 if row > rows_of(number).start else NO_STATE
            parts.append(run(inputs[row : row + 1], states, StateSequences([StateSequence(0, 1, source, 0)])))
    return torch.cat(parts)


def mixed(run: Run, inputs: torch.Tensor, num_values: int) -> torch.Tensor:
    """Return the same of passes with chunks of several sequences. Each sequence resumes from its own state. One starts
    from another's kept state, of that pass or of an earlier one.
    """
    a, b, c = (rows_of(number) for number in range(3))
    states = LayerStates(torch.full((6, num_values), torch.nan))
    rows_found: dict[int, torch.Tensor] = {}

    def one_pass(*parts: tuple[range, int, int, list[tuple[int, int]]]) -> None:
        sequences, first = [], 0
        for rows, source, target, saves in parts:
            sequences.append(StateSequence(first, len(rows), source, target, saves))
            first += len(rows)
        places = [row for rows, *_ in parts for row in rows]
        found = run(inputs[places], states, StateSequences(sequences))
        for row, result in zip(places, found, strict=True):
            assert torch.equal(rows_found.setdefault(row, result), result)

    one_pass((a[:5], NO_STATE, 0, []), (c[:7], NO_STATE, 1, [(2, 2), (6, 3)]), (b, NO_STATE, 4, []))
    one_pass((c[6:9], 3, 5, []), (a[5:6], 0, 0, []))  # the token computed twice has the same bits
    one_pass((c[9:11], 5, 5, [(2, 2)]), (c[11:], 2, 1, []), (a[6:], 0, 0, []))
    return torch.stack([rows_found[row] for row in range(sum(LENGTHS))])
