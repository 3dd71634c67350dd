"""What `config.json` says of experts in DeepSeek's words, which other families took over with its way of routing.

Source: DeepSeek-V3 (2412.19437), 2.1.2: experts are ranked by the sigmoid of a score plus a bias that balances loads.
Only experts of the best groups are candidates. The weights are the chosen sigmoids, normalized to sum to a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import check_supported, read_num_layers
from moeflow.models.layers.moe import ExpertNames

BIASED_NAMES: Final = ExpertNames(choice_bias="gate.e_score_correction_bias")
_MAX_PREDICTORS: Final = 64
_EPSILON: Final = 1e-20  # added to the sum of the chosen sigmoids
_SUPPORTED: Final = {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}


def read_routed_experts(reader: ConfigReader, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` about experts, shared ones and the first, dense layers.

    `defaults` are the family's values for missing keys; null keys have no effect.

    Raises: CheckpointError.
    """
    reader = ConfigReader({**defaults, **reader.raw}, reader.file)
    width = reader.positive("moe_intermediate_size")
    num_dense = min(count(reader, "first_k_dense_replace", 0), read_num_layers(reader))
    return {
        "num_experts": reader.positive("n_routed_experts"),
        "top_k": reader.positive("num_experts_per_tok"),
        "norm_topk_prob": reader.get(bool, "norm_topk_prob", True),
        "routed_scaling_factor": reader.number("routed_scaling_factor", 1.0, least=0.0, most=1e6),
        "num_expert_groups": reader.positive("n_group", 1),
        "num_chosen_groups": reader.positive("topk_group", 1),
        "unused_prefixes": predictors(reader),
        "intermediate_size": width,
        "shared_intermediate_size": width * count(reader, "n_shared_experts", 0),
        "dense_layers": tuple(range(num_dense)),
        "dense_intermediate_size": reader.positive("intermediate_size"),
    }


def predictors(reader: ConfigReader) -> tuple[str, ...]:
    """Return how the names of layers begin that predict further tokens; they come after the last one."""
    num_layers, num_more = read_num_layers(reader), count(reader, "num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{num_layers + number}." for number in range(min(num_more, _MAX_PREDICTORS)))


def count(reader: ConfigReader, key: str, default: int) -> int:
    """Return a whole number from 0 on."""
    return int(reader.number(key, reader.get(int, key, default), least=0, most=2**31))


def sigmoid_routing(config: ModelConfig) -> Routing:
    """Return DeepSeek-V3's way of routing."""
    return Routing(
        config.routing.top_k,
        renormalize=config.routing.norm_topk_prob,
        score="sigmoid",
        num_groups=config.routing.num_expert_groups,
        num_chosen_groups=config.routing.num_chosen_groups,
        group_score="top2_sum",
        epsilon=_EPSILON,
        scale=config.routing.routed_scaling_factor,
    )


def check_sigmoid_routing(config: ModelConfig, reader: ConfigReader) -> ModelConfig:
    """Return the config; raises CheckpointError unless experts are routed so, and can be chosen."""
    check_supported(reader, _SUPPORTED)
    return check_routing(config, reader, sigmoid_routing(config))


def check_routing(config: ModelConfig, reader: ConfigReader, routing: Routing) -> ModelConfig:
    """Return the config; raises CheckpointError if experts cannot be chosen so."""
    try:
        routing.check(config.routing.num_experts)
    except ValueError as error:
        raise reader.error(str(error)) from None
    return config
