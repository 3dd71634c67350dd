"""How a layer with latent attention cuts what it projects, and what happens to it before attention."""

from __future__ import annotations

import msgspec

from moeflow.kernels.norm import NormWeights


class LatentHeads(msgspec.Struct, frozen=True):
    """A row of the first projections: queries, or what is projected up to them, a latent, and a rotary key."""

    num_heads: int
    nope_dim: int  # of a head's query, and key, what is not rotated,
    rope_dim: int  # and what is
    latent_dim: int
    value_dim: int  # of a head
    is_interleaved: bool  # rotary positions rotate neighbours against each other, else halves
    latent_norm: NormWeights
    q_norm: NormWeights | None = None  # of what is projected up to queries; None: they are projected at once

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query as it is projected."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Dimensions of what is kept of a token, and so of queries that meet it."""
        return self.latent_dim + self.rope_dim
