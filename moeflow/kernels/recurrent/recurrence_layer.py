"""What a linear recurrence is made of: its heads and weights, and what the tokens of a pass bring."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeflow.kernels.arrays import Array

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RecurrenceInput:
    """What the tokens of a pass bring. The first three are parts of one row of each token, and so are the gates."""

    queries: Tensor  # [T, key heads * key_dim]
    keys: Tensor  # the same
    values: Tensor  # [T, heads * value_dim]
    steps: Tensor  # [T, heads], before the bias and softplus
    rates: Tensor | None  # [T, heads], before the sigmoid; None: steps are rates, too


@dataclass(frozen=True, slots=True, eq=False)
class RecurrenceLayer:
    """The heads of a layer and their weights."""

    num_heads: int
    num_key_heads: int  # each is shared by as many heads, neighbours unless they take turns
    key_dim: int
    value_dim: int
    step_bias: Array  # [heads] float32
    log_decay: Array  # [heads] float32
    skip: Array | None  # [heads] float32: how much of a value is added to the result
    is_delta: bool  # a value replaces what the state has for its key, else it is added
    norm_eps: float | None  # of the lengths that queries and keys are divided by; None: they are not
    query_scale: float
    least_step: float = 0.0
    most_step: float = math.inf
    key_heads_take_turns: bool = False  # the heads' keys are those of 0, 1, .., 0, 1, .., else 0, 0, .., 1, 1, ..

    @property
    def state_values(self) -> int:
        """Numbers of a state: [heads, key_dim, value_dim]."""
        return self.num_heads * self.key_dim * self.value_dim
