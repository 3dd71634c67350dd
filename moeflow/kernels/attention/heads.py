"""What a layer's queries, keys and values are, and what happens to them before attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

MAX_INTERLEAVED: Final = 2048  # largest head size for rotating neighbours in the extension


@dataclass(frozen=True, slots=True)
class Heads:
    """How a row of the QKV projection is cut into heads: queries, then keys, then values; and how they are prepared."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None  # [D], or [heads * D] where the norm runs over all heads; None: no norm
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None  # [D]; None: values are not normalised
    eps: float = 0.0  # of the norms
    clip: float | None = None  # queries, keys and values are cut to [-clip, clip]
    norms_last: bool = False  # norms of single heads come after the rotation, else first
    has_keys: bool = True  # else a row is queries alone, which attend to another layer's keys and values
    is_interleaved: bool = False  # positions rotate neighbours against each other, else the halves of a head

    @property
    def row_size(self) -> int:
        """Values of a row: of queries, and of keys and values if there are some."""
        return (self.num_heads + (2 * self.num_kv_heads if self.has_keys else 0)) * self.head_dim

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norm runs over all heads of a token, not over each by itself."""
        return self.q_norm is not None and self.q_norm.shape != (self.head_dim,)
