"""A GGUF file's metadata as the `config.json` that the same model has in a Hugging Face folder.

So models read one form, whatever the file. Metadata that would change the arithmetic and has no counterpart
is refused, never dropped silently. Reads no weights; the table of rotary factors is handed in.

Source: the keys of gguf.constants; what llama.cpp takes as default where a key is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moeflow.checkpoint.gguf.header import GGUFHeader
from moeflow.checkpoint.gguf.names import GPT_OSS_NAMES, GRANITE_NAMES, MIXTRAL_NAMES, MLP_NAMES, MoeNames
from moeflow.checkpoint.gguf.rope import scaling_from_factors, scaling_from_metadata
from moeflow.core.brief import brief
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader

ROPE_FACTORS = "rope_freqs.weight"

# Metadata that changes the arithmetic -> values under which it does not.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "expert_shared_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # 1: softmax
    "leading_dense_block_count": (0,),
    "interleave_moe_layer_step": (0, 1),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_attn_factor": (-1.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture maps to a Hugging Face family."""

    model_type: str
    huggingface_class: str
    integers: Mapping[str, str]  # Hugging Face key -> GGUF key, of feed-forward widths, expert counts and the like
    constants: Mapping[str, Any] = field(default_factory=dict)  # what GGUF leaves to the architecture's name
    moe_names: MoeNames | None = None  # None: dense
    layer_names: Mapping[str, str] = field(default_factory=dict)  # GGUF's in a layer that others do not have
    scaling: Mapping[str, Any] = field(default_factory=dict)  # of rotary positions, what GGUF leaves out
    stores_pairs: bool = False  # whether rows of q and k are stored in pairs, see `gguf_names`
    optional: Mapping[str, str] = field(default_factory=dict)  # as `integers`: numbers that need not be there, or are 0
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict  # makes the config whole, at last


_WIDTH = {"intermediate_size": "feed_forward_length"}
_TOP_K = {"num_experts_per_tok": "expert_used_count"}
_LLAMA = Architecture("llama", "LlamaForCausalLM", _WIDTH, stores_pairs=True)
_MIXTRAL = Architecture(
    "mixtral",
    "MixtralForCausalLM",
    _WIDTH | _TOP_K | {"num_local_experts": "expert_count"},
    {"sliding_window": None},
    MIXTRAL_NAMES,
    stores_pairs=True,
)


def _scale_of_gemma3(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return by what scores are scaled, which is otherwise in the largest model alone: llama.cpp knows it, too."""
    hidden_size, num_heads = config["hidden_size"], config["num_attention_heads"]
    is_27b = config["num_hidden_layers"] == 62
    return {**config, "query_pre_attn_scalar": hidden_size // num_heads if is_27b else config["head_dim"]}


_GRANITE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    _WIDTH | _TOP_K | {"num_local_experts": "expert_count"},
    optional={
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    },
    moe_names=GRANITE_NAMES,
    layer_names={f"ffn_{part}_shexp": f"shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    stores_pairs=True,
)
_GRANITE_SHARED = replace(
    _GRANITE,
    model_type="granitemoeshared",
    huggingface_class="GraniteMoeSharedForCausalLM",
    integers={**_GRANITE.integers, "shared_intermediate_size": "expert_shared_feed_forward_length"},
)
_OTHERS = {
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _WIDTH),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _WIDTH),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _WIDTH | _TOP_K | {"num_experts": "expert_count", "moe_intermediate_size": "expert_feed_forward_length"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        MLP_NAMES,
    ),
    "olmoe": Architecture(
        "olmoe",
        "OlmoeForCausalLM",
        _WIDTH | _TOP_K | {"num_experts": "expert_count"},
        {"norm_topk_prob": False, "clip_qkv": None},
        MLP_NAMES,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _TOP_K
        | {
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
            "sliding_window": "attention.sliding_window",
        },
        moe_names=GPT_OSS_NAMES,
        layer_names={"post_attention_norm": "post_attention_layernorm"},
        scaling={"truncate": False},
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _WIDTH | {"sliding_window": "attention.sliding_window"},
        {"hidden_activation": "gelu_pytorch_tanh"},
        optional={
            "sliding_window_pattern": "attention.sliding_window_pattern",
            "rope_local_base_freq": "rope.freq_base_swa",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        derive=_scale_of_gemma3,
        layer_names={
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    ),
    "granitemoe": _GRANITE,
}


def read_architecture(metadata: Mapping[str, Any], file: Path) -> Architecture:
    """Return the family; raises CheckpointError, naming what is supported, for any other."""
    reader = ConfigReader(metadata, file)
    name = reader.get(str, "general.architecture")
    if reader.get(int, "split.count", 0) > 1:
        raise CheckpointError(
            f"is one of {metadata['split.count']} parts of a model",
            file=file,
            remedy="Join the parts first: llama-gguf-split --merge FIRST_PART WHOLE_FILE",
        )
    if name == "llama":
        return _MIXTRAL if reader.get(int, "llama.expert_count", 0) > 0 else _LLAMA
    if name == "granitemoe" and reader.get(int, "granitemoe.expert_shared_feed_forward_length", 0) > 0:
        return _GRANITE_SHARED
    if name not in _OTHERS:
        raise CheckpointError(
            f"is of the architecture {brief(name)}",
            file=file,
            remedy=f"Supported in GGUF files are llama (dense and Mixtral), {', '.join(_OTHERS)}",
        )
    return _OTHERS[name]


def translate_config(
    header: GGUFHeader, architecture: Architecture, read_factors: Callable[[], Sequence[float]], file: Path
) -> dict[str, Any]:
    """Return the Hugging Face config; `read_factors` gives the rotary factors [D/2] if the file has them.

    Raises: CheckpointError if a key is missing, of the wrong type, or means something unsupported.
    """
    reader = _SectionReader(header.metadata, file)
    for key, neutral in _NEUTRAL_VALUES.items():
        is_read = key in architecture.integers.values() or key in architecture.optional.values()
        if not is_read and reader.raw.get(key, neutral[0]) not in neutral:
            raise reader.error(f"{key!r} is {brief(reader.raw[key])}, which is not supported")
    embeddings = header.tensors.get("token_embd.weight")
    num_heads = reader.positive("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [architecture.huggingface_class],
        "model_type": architecture.model_type,
        "vocab_size": reader.positive("vocab_size", embeddings.shape[0] if embeddings else 0),
        "hidden_size": reader.positive("embedding_length"),
        "num_hidden_layers": reader.positive("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": reader.positive("attention.head_count_kv", num_heads),
        "head_dim": _head_dim(reader, num_heads),
        "max_position_embeddings": reader.positive("context_length"),
        "rms_norm_eps": reader.get(float, "attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    config |= _rope_config(header, config["head_dim"], read_factors, reader)
    if config["rope_scaling"] is not None:
        config["rope_scaling"] |= architecture.scaling
    config |= {key: reader.positive(source) for key, source in architecture.integers.items()}
    config |= {key: reader.raw[source] for key, source in architecture.optional.items() if reader.raw.get(source)}
    return dict(architecture.derive(config)) | dict(architecture.constants) | translate_token_ids(header.metadata, file)


def translate_token_ids(metadata: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the special tokens' ids: as much of `generation_config.json` as GGUF knows.

    `eos_token_id` is a list where a turn ends in more ways than the text.
    """
    reader = ConfigReader(metadata, file)
    kinds = ("bos", "eos", "eot", "eom", "padding")
    ids = {kind: reader.get(int, f"tokenizer.ggml.{kind}_token_id", -1) for kind in kinds}
    ends = list(dict.fromkeys(ids[kind] for kind in ("eos", "eot", "eom") if ids[kind] >= 0))
    config: dict[str, Any] = {}
    if ids["bos"] >= 0:
        config["bos_token_id"] = ids["bos"]
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    if ids["padding"] >= 0:
        config["pad_token_id"] = ids["padding"]
    return config


class _SectionReader(ConfigReader):
    """Reads the keys that begin with the architecture's name, by the rest of the key."""

    def __init__(self, metadata: Mapping[str, Any], file: Path) -> None:
        self._prefix = f"{metadata['general.architecture']}."
        section = {
            key.removeprefix(self._prefix): value for key, value in metadata.items() if key.startswith(self._prefix)
        }
        super().__init__(section, file)

    def error(self, problem: str) -> CheckpointError:
        return super().error(f"metadata {self._prefix}*: {problem}")


def _head_dim(reader: ConfigReader, num_heads: int) -> int:
    width = max(reader.positive("embedding_length") // num_heads, 1)
    head_dim = reader.positive("attention.key_length", width)
    for key in ("attention.value_length", "rope.dimension_count"):
        if reader.positive(key, head_dim) != head_dim:
            raise reader.error(f"{key!r} is {reader.raw[key]}, a head has {head_dim} dimensions: not supported")
    return head_dim


def _rope_config(
    header: GGUFHeader, head_dim: int, read_factors: Callable[[], Sequence[float]], reader: ConfigReader
) -> dict[str, Any]:
    theta = reader.get(float, "rope.freq_base", 10000.0)
    if theta <= 0.0:
        raise reader.error(f"'rope.freq_base' is {theta}, where a positive number is expected")
    table = header.tensors.get(ROPE_FACTORS)
    if table is None:
        return {"rope_theta": theta, "rope_scaling": scaling_from_metadata(reader)}
    if table.shape != (head_dim // 2,):
        raise CheckpointError(
            f"has the shape {list(table.shape)}, where [{head_dim // 2}] is expected",
            file=reader.file,
            tensor=ROPE_FACTORS,
            remedy="Convert the model again",
        )
    return {"rope_theta": theta, "rope_scaling": scaling_from_factors(read_factors(), theta, reader)}
