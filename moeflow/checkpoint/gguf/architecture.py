"""An architecture of GGUF files: the mapping of its keys and tensors to a Hugging Face family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from moeflow.checkpoint.gguf.cuts import Cut
from moeflow.checkpoint.gguf.names import MoeNames
from moeflow.core.model_config import ConfigReader

WIDTH: Final = {"intermediate_size": "feed_forward_length"}
TOP_K: Final = {"num_experts_per_tok": "expert_used_count"}
SOFTMAX, SIGMOID = 1, 2  # values of `expert_gating_func`: how experts are scored; 0 leaves it to the architecture


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture maps to a Hugging Face family."""

    model_type: str
    huggingface_class: str
    integers: Mapping[str, str]  # Hugging Face key -> GGUF key, of feed-forward widths and expert counts
    constants: Mapping[str, Any] = field(default_factory=dict)  # what GGUF leaves to the architecture's name
    moe_names: MoeNames | None = None  # None: dense
    layer_names: Mapping[str, str] = field(default_factory=dict)  # GGUF's in a layer that others do not have
    scaling: Mapping[str, Any] = field(default_factory=dict)  # of rotary positions, what GGUF leaves out
    # Hugging Face key -> GGUF key and its default: numbers from 0, or flags.
    optional: Mapping[str, tuple[str, float | bool]] = field(default_factory=dict)
    gatings: tuple[int, ...] = (0, SOFTMAX)  # values of `expert_gating_func` that fit the family
    may_be_partial: bool = False  # whether positions may rotate a part of each head
    stores_pairs: bool = False  # whether rows of q and k are stored in pairs, see `names.heads_in_pairs`
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # makes the config whole, at last
    is_latent: bool = False  # whether attention is latent
    eps_key: str = "attention.layer_norm_rms_epsilon"  # of the norms
    layer_kinds: tuple[str, str] | None = None  # what layers are called that have key heads, and others; None: all have
    mixer_keys: Callable[[ConfigReader], Mapping[str, Any]] | None = None  # of those others, if the file has some
    may_be_long: bool = False  # whether positions may be stretched by tables for short texts and long ones
    has_local_heads: bool = False  # whether layers with a window have heads of their own
    # Tensors of a layer that are one in GGUF and several in Hugging Face: the rows for each name before the suffix.
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    @property
    def understood(self) -> set[str]:
        """Keys of GGUF that are translated."""
        return {*self.integers.values(), *(key for key, _ in self.optional.values())}
