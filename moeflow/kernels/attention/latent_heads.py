"""How a layer with latent attention splits its projections and prepares them for attention."""

from __future__ import annotations

import msgspec

from moeflow.kernels.norm import NormWeights


class LatentHeads(msgspec.Struct, frozen=True):
    """A row of the first projections: queries or their latents, the latent of keys and values, and a rotary key."""

    num_heads: int
    nope_dim: int  # dimensions of a head's query and key without rotation,
    rope_dim: int  # and what is
    latent_dim: int
    value_dim: int  # of a head
    is_interleaved: bool  # rotary positions rotate neighbours against each other, else halves
    latent_norm: NormWeights
    q_norm: NormWeights | None = None  # of the latents of queries; None: they are projected at once

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query as it is projected."""
        return self.nope_dim + self.rope_dim

    @property
    def key_dim(self) -> int:
        """Dimensions of a token's stored latent and rotary key, and so of its queries."""
        return self.latent_dim + self.rope_dim
