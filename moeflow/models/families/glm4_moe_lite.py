"""GLM-4.7-Flash: DeepSeek-V3's layers; the config lists the dense ones."""

from __future__ import annotations

from typing import Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.config_keys import read_decoder_config, read_num_layers
from moeflow.models.families.deepseek_v3 import make_layer
from moeflow.models.latent_keys import read_latent_fields
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.routed_keys import check_sigmoid_routing, read_routed_experts

_DEFAULTS: Final = {"routed_scaling_factor": 1.8, "n_shared_experts": 1}


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    fields = read_routed_experts(reader, _DEFAULTS) | {"dense_layers": _dense_layers(reader)}
    config = read_decoder_config(
        reader,
        model_type="glm4_moe_lite",
        **fields,
        **read_latent_fields(reader, is_interleaved=reader.get(bool, "rope_interleave", True)),
    )
    return check_sigmoid_routing(config, reader)


def _dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Return the layers without experts: the listed ones, else the first."""
    kinds = reader.raw.get("mlp_layer_types")
    if kinds is None:
        return (0,)
    num_layers = read_num_layers(reader)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not all(it in ("dense", "sparse") for it in kinds):
        raise reader.error(
            f"'mlp_layer_types' is {truncated_repr(kinds)}, where {num_layers} of 'dense', 'sparse' are expected"
        )
    return tuple(layer_idx for layer_idx, kind in enumerate(kinds) if kind == "dense")


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, make_layer)
