"""Granite MoE, with and without a shared expert: embeddings, residuals, scores and logits have multipliers.

What each layer adds is multiplied by m, the residual multiplier. Hidden states are divided by m throughout, so layers
add their results unscaled. Norms give the same with an epsilon divided by m^2; embeddings are divided by m.
"""

from __future__ import annotations

from typing import Any, Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import MIN_EPS, read_decoder_config, read_num_experts
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.mlp import NetworkNames
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.shared_network import SharedNames
from moeflow.models.layers.weight_allocator import WeightAllocator

SHARED: Final = NetworkNames(block="shared_mlp")
NAMES: Final = ExpertNames(block="block_sparse_moe", router="router.layer", shared=SharedNames(SHARED))
_LEAST, _MOST = 1e-4, 1e4  # of multipliers


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_granite_config(reader, "granitemoe", num_experts=read_num_experts(reader))


def read_granite_config(reader: ConfigReader, model_type: str, *, num_experts: int, **family: Any) -> ModelConfig:
    """Return the model's shape; `family` is as `read_decoder_config` has it. Raises: CheckpointError."""
    embedding, residual, attention, logits = (
        reader.number(key, 1.0, least=_LEAST, most=_MOST)
        for key in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    has_bias = reader.get(bool, "attention_bias", False)
    return read_decoder_config(
        reader,
        model_type=model_type,
        num_experts=num_experts,
        top_k=reader.positive("num_experts_per_tok") if num_experts else 0,
        qkv_bias=has_bias,
        out_bias=has_bias,
        score_scale=attention,
        embedding_scale=embedding / residual,
        eps=reader.number("rms_norm_eps", least=MIN_EPS, most=1.0) / residual**2,
        logit_scale=1.0 / logits,
        **family,
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def make_experts(config: ModelConfig, allocator: WeightAllocator) -> MoE:
    """Return a layer's experts: a softmax over the chosen ones alone is that over all, renormalised."""
    return MoE(config, allocator, Routing(config.routing.top_k, renormalize=True), NAMES)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    attention = Attention(config, allocator, layer_idx)
    return DecoderLayer(config, allocator, attention, make_experts(config, allocator))
