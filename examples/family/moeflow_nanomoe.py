"""NanoMoE: Llama's layers with experts named as in OLMoE, chosen by a sigmoid of each logit."""

from moeflow.core.model_config import ConfigReader, ModelConfig
from moeflow.kernels.routing import Routing
from moeflow.models.config_keys import read_decoder_config, read_num_experts
from moeflow.models.layers.attention import Attention
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import ExpertNames, MoE
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.registry import FamilyRow

FAMILY = FamilyRow("NanoMoeForCausalLM", __name__)  # the class that config.json names, and where the two functions are


def read_config(reader: ConfigReader) -> ModelConfig:
    """Read `config.json`. Raises: CheckpointError."""
    return read_decoder_config(
        reader,
        model_type="nanomoe",
        num_experts=read_num_experts(reader),
        top_k=reader.positive("num_experts_per_tok"),
    )


def build(config: ModelConfig, allocator: WeightAllocator) -> CausalLM:
    """Return the model with its weights still to be filled."""
    return CausalLM(config, allocator, _layer)


def _layer(config: ModelConfig, allocator: WeightAllocator, layer_idx: int) -> DecoderLayer:
    choose = Routing(config.routing.top_k, score="sigmoid", renormalize=True)
    return DecoderLayer(
        config, allocator, Attention(config, allocator, layer_idx), MoE(config, allocator, choose, ExpertNames())
    )
