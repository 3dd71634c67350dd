"""Linear attention with decay: each head's state is a matrix that maps keys to values, of which old ones fade.

With the delta rule it is Gated DeltaNet's (2412.06464), without it Mamba2's (2405.21060).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeflow.kernels.cpu import recurrent as cpu
from moeflow.kernels.on_demand import torch
from moeflow.kernels.recurrent.state_sequences import LayerStates, StateSequences

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
class Recurrence:
    """The heads of a layer and their weights."""

    num_heads: int
    num_key_heads: int  # each is shared by as many neighbouring heads
    key_dim: int
    value_dim: int
    step_bias: Tensor  # [heads] float32
    log_decay: Tensor  # [heads] float32
    skip: Tensor | None  # [heads] float32: how much of a value is added to the result
    is_delta: bool  # a value replaces what the state has for its key, else it is added
    norm_eps: float | None  # of the lengths that queries and keys are divided by; None: they are not
    query_scale: float
    least_step: float = 0.0
    most_step: float = math.inf

    @property
    def state_values(self) -> int:
        """Numbers of a state: [heads, key_dim, value_dim]."""
        return self.num_heads * self.key_dim * self.value_dim

    def __call__(self, given: RecurrenceInput, states: LayerStates, sequences: StateSequences) -> Tensor:
        """Return what each token's queries find once it is taken up, [T, heads * value_dim].

        For each head: S = decay S; v' = rate (v - S^T k) with the delta rule, else rate v; S += k v'^T; S^T q + skip v.
        """
        if all(cpu.accepts(x) for x in (given.values, self.step_bias)):
            return cpu.recurrence(self, given, states, sequences)
        steps = torch.nn.functional.softplus(given.steps.float() + self.step_bias.float())
        steps = steps.clamp(self.least_step, self.most_step)
        decays = torch.exp(-torch.exp(self.log_decay.float()) * steps)[..., None, None]
        rates = (steps if given.rates is None else given.rates.float().sigmoid())[..., None]
        queries, keys = (self._keys(x) for x in (given.queries, given.keys))
        queries = queries * self.query_scale
        values = given.values.float().unflatten(1, (self.num_heads, self.value_dim))
        out = torch.empty_like(values)
        for sequence in sequences:
            saves = {**dict(sequence.saves)}
            state = states.read(sequence.source, self.num_heads, self.key_dim, self.value_dim)
            for number in range(sequence.num_tokens):
                row = sequence.first_row + number
                state = state * decays[row]
                added = values[row]
                if self.is_delta:
                    added = added - torch.einsum("hkv,hk->hv", state, keys[row])
                state = state + torch.einsum("hk,hv->hkv", keys[row], added * rates[row])
                out[row] = torch.einsum("hkv,hk->hv", state, queries[row])
                if number + 1 in saves:
                    states.write(saves[number + 1], state)
            states.write(sequence.target, state)
        if self.skip is not None:
            out += values * self.skip.float()[:, None]
        return out.flatten(1).to(given.values.dtype)

    def _keys(self, x: Tensor) -> Tensor:
        """Return queries or keys for all heads: [T, heads, key_dim]."""
        x = x.float().unflatten(1, (self.num_key_heads, self.key_dim))
        if self.norm_eps is not None:
            x = x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + self.norm_eps)
        return x.repeat_interleave(self.num_heads // self.num_key_heads, dim=1)
