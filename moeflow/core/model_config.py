"""A decoder's shape, in the field's standard terms, whatever its checkpoint called them.

Each model file turns its own `config.json` keys into this; `ConfigReader` makes a missing or mistyped key
an error instead of a silent default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from moeflow.core.brief import brief
from moeflow.core.errors import CheckpointError

MOST = 1 << 48  # what any size may be: beyond all memory, and far from where 64 bits overflow
Number = TypeVar("Number", int, float, bool, str)
_REQUIRED: Any = object()


KV_FORMATS: Final = {  # of keys and values: bytes of a number, and of the scale that a head's key or value has
    "float32": (4, 0),
    "float16": (2, 0),
    "bfloat16": (2, 0),
    "int8": (1, 4),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear, llama3, yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer. Dense models have `num_experts` 0."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert; in a dense model, of the feed-forward network
    max_position: int  # longest context the model was made for, in tokens
    rms_norm_eps: float
    rope: RopeConfig
    num_experts: int = 0
    top_k: int = 0  # experts per token
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()  # layers of an MoE model that have no experts
    dense_intermediate_size: int = 0  # of those layers
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    clip_qkv: float | None = None
    sliding_window: int | None = None  # tokens a query sees, itself included; None: all
    hidden_act: str = "silu"

    @property
    def num_parameters(self) -> int:
        """Parameters of all layers and embeddings, norms left out (under 0.1%)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        ffn = 3 * self.hidden_size * self.intermediate_size * max(self.num_experts, 1)
        router = self.hidden_size * self.num_experts
        dense_ffn = 3 * self.hidden_size * self.dense_intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        num_dense = len(self.dense_layers)
        num_uniform = self.num_layers - num_dense
        return self.num_layers * attention + num_uniform * (ffn + router) + num_dense * dense_ffn + embeddings

    @property
    def num_active_parameters(self) -> int:
        """Parameters one token's pass reads, the embedding table left out."""
        idle_experts = max(self.num_experts - self.top_k, 0)
        num_moe_layers = self.num_layers - len(self.dense_layers)
        idle = num_moe_layers * 3 * self.hidden_size * self.intermediate_size * idle_experts
        table = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_parameters - idle - table

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Return what one token's keys and values take over all layers, in bytes."""
        value_bytes, scale_bytes = KV_FORMATS[kv_dtype]
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * value_bytes + scale_bytes)


class ConfigReader:
    """Typed access to a `config.json`: wrong or missing keys are errors that name file, key and remedy."""

    def __init__(self, raw: Mapping[str, Any], file: Path | str) -> None:
        self.raw = raw
        self.file = file

    def get(self, kind: type[Number], key: str, default: Any = _REQUIRED) -> Number:
        """Return `raw[key]` as `kind`; null counts as missing.

        Raises: CheckpointError if the key is missing without a default, or of another type.
        """
        value = self.raw.get(key)
        if value is None:
            if default is _REQUIRED:
                raise self.error(f"has no {key!r}")
            return cast(Number, default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < MOST else math.inf
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(f"{key!r} is {brief(value)}, where {kind.__name__} is expected")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"{key!r} is {value!r}, which is no finite number")
        return value

    def positive(self, key: str, default: Any = _REQUIRED, *, most: int = MOST) -> int:
        """Return a whole number from 1 to `most`."""
        value = self.get(int, key, default)
        return int(self._within(key, value, 1, most))

    def number(self, key: str, default: Any = _REQUIRED, *, least: float, most: float) -> float:
        """Return a number from `least` to `most`."""
        return self._within(key, self.get(float, key, default), least, most)

    def _within(self, key: str, value: float, least: float, most: float) -> float:
        if not least <= value <= most:
            bound = f"at least {least:g}" if value < least else f"at most {most:g}"
            raise self.error(f"{key!r} is {brief(value)}, where {bound} is expected")
        return value

    def error(self, problem: str) -> CheckpointError:
        """Make the error that blames this file."""
        return CheckpointError(
            problem, file=self.file, remedy="Download or convert the model again, or correct this key"
        )
