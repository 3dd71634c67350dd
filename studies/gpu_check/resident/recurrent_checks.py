"""Checks of linear recurrences: token by token, and in chunks where models run in 16 bits."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from moeflow.kernels.recurrent.recurrence import recurrence
from moeflow.kernels.recurrent.recurrence_layer import RecurrenceInput, RecurrenceLayer
from moeflow.kernels.recurrent.state_sequences import NO_STATE, LayerStates, StateSequence, StateSequences
from studies.gpu_check.resident.accuracy import Accuracy, by_torch, poisoned_memory


class _Sizes(NamedTuple):
    num_heads: int
    num_key_heads: int
    head_dim: int  # of keys and values

    @property
    def parts(self) -> list[int]:
        """Numbers of a token: queries, keys, values, steps and rates."""
        of_keys, of_values = self.num_key_heads * self.head_dim, self.num_heads * self.head_dim
        return [of_keys, of_keys, of_values, self.num_heads, self.num_heads]


_LENGTHS: Final = (35, 1)  # of sequences; the first one stores a checkpoint
_CHECKPOINT: Final = 9


def check_recurrences(accuracy: Accuracy) -> None:
    """Check the gated delta rule and Mamba2 with the sizes of Qwen3-Next, outputs and states."""
    from moeflow.kernels.triton import chunked_recurrence
    from moeflow.kernels.triton import recurrence as token_by_token

    kernels = {"recurrence": token_by_token.recurrence}
    if accuracy.dtype != torch.float32:
        kernels["recurrence in chunks"] = chunked_recurrence.recurrence
    sizes = _Sizes(1, 1, 16) if accuracy.target.is_rehearsal else _Sizes(32, 16, 128)
    for is_delta in (True, False):
        layer, rows = _layer(accuracy, sizes, is_delta), accuracy.draw(sum(_LENGTHS), sum(sizes.parts))
        with by_torch():
            wanted = _results(recurrence, layer, sizes, rows.double())
        for name, kernel in kernels.items():
            with accuracy.target.kernels(), poisoned_memory():
                found = _results(kernel, layer, sizes, rows)
            accuracy.target.wait()
            accuracy.take(name, found, wanted)


def _results(run: Any, layer: RecurrenceLayer, sizes: _Sizes, rows: Tensor) -> list[Tensor]:
    """Return what tokens find, and the stored states."""
    slots = torch.zeros(3, layer.state_values, device=rows.device)
    first, second = _LENGTHS
    sequences = StateSequences(
        [StateSequence(0, first, NO_STATE, 0, [(_CHECKPOINT, 1)]), StateSequence(first, second, NO_STATE, 2)]
    )
    queries, keys, values, steps, rates = torch.split(rows, sizes.parts, dim=1)
    given = RecurrenceInput(queries, keys, values, steps, rates if layer.is_delta else None)
    return [run(layer, given, LayerStates(slots), sequences), slots]


def _layer(accuracy: Accuracy, sizes: _Sizes, is_delta: bool) -> RecurrenceLayer:
    step_bias, log_decay, skip = (accuracy.draw(sizes.num_heads).float() for _ in range(3))
    return RecurrenceLayer(
        num_heads=sizes.num_heads,
        num_key_heads=sizes.num_key_heads,
        key_dim=sizes.head_dim,
        value_dim=sizes.head_dim,
        step_bias=step_bias,
        log_decay=log_decay,
        skip=None if is_delta else skip,
        is_delta=is_delta,
        norm_eps=1e-6 if is_delta else None,
        query_scale=sizes.head_dim**-0.5,
    )
