"""What the families' `config.json` files have in common, read into `ModelConfig`.

Keys that would change the arithmetic in a way we do not compute are errors, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from moeflow.core.attention_config import AttentionKind
from moeflow.core.feed_forward_config import HiddenAct
from moeflow.core.model_config import MAX_LAYERS, ConfigReader, ModelConfig
from moeflow.core.truncated_repr import truncated_repr
from moeflow.models.rope_keys import read_rope

MIN_EPS = 1e-30  # far below what models have, and far from where norms would stop being numbers
_ACTIVATIONS: Final[dict[str, HiddenAct]] = {"silu": "silu", "swish": "silu"}
_SLIDING: Final = {"full_attention": False, "sliding_attention": True}
_Kind = TypeVar("_Kind")


def read_decoder_config(
    reader: ConfigReader,
    *,
    model_type: str,
    default_theta: float = 10000.0,
    eps_key: str = "rms_norm_eps",
    may_be_partial: bool = False,
    default_head_dim: int | None = None,
    default_rotary_share: float = 1.0,
    **family: Any,
) -> ModelConfig:
    """Return the model's shape; `family` adds or replaces fields of `ModelConfig`.

    `eps_key` is what the config calls the norms' epsilon. Only where it `may_be_partial` may positions rotate a part
    of a head. `default_head_dim`: None: the hidden size over the number of heads. `default_rotary_share` is which share
    of them is rotated.

    Raises: CheckpointError, naming the key, if one is missing, contradicts another or is not supported.
    """
    hidden_size = reader.positive("hidden_size")
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error(
            f"'num_attention_heads' is {num_heads}, no multiple of 'num_key_value_heads', {num_kv_heads}"
        )
    if "head_dim" in family:
        head_dim = family["head_dim"]
    else:
        head_dim = _read_head_dim(reader, default_head_dim or max(hidden_size // num_heads, 1))
    max_position = reader.positive("max_position_embeddings")
    fields: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": read_num_layers(reader),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position": max_position,
        "eps": reader.number(eps_key, least=MIN_EPS, most=1.0),
        "tie_word_embeddings": reader.get(bool, "tie_word_embeddings", False),
    }
    if "hidden_act" not in family:
        fields["hidden_act"] = _read_activation(reader)
    if "intermediate_size" not in family:
        fields["intermediate_size"] = reader.positive("intermediate_size")
    if "rope" not in family:
        fields["rope"] = read_rope(
            reader,
            default_theta,
            max_position,
            head_dim,
            may_be_partial=may_be_partial,
            default_share=default_rotary_share,
        )
    config = ModelConfig.from_fields(**(fields | family))
    if config.routing.top_k > config.routing.num_experts:
        raise reader.error(f"'num_experts_per_tok' is {config.routing.top_k}, of {config.routing.num_experts} experts")
    return config


def text_part(reader: ConfigReader) -> ConfigReader:
    """Return the config of the text model within a multimodal one. Raises: CheckpointError."""
    text: Any = reader.raw.get("text_config")
    if not isinstance(text, Mapping):
        raise reader.error("has no 'text_config', an object")
    tied = {key: reader.raw[key] for key in ("tie_word_embeddings",) if reader.raw.get(key) is not None}
    return ConfigReader({**text, **tied}, reader.file)


def check_supported(reader: ConfigReader, supported: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise CheckpointError if a key has an unsupported value."""
    for key, values in supported.items():
        if reader.raw.get(key, values[0]) not in values:
            raise reader.error(
                f"{key!r} is {truncated_repr(reader.raw[key])}; supported is {' or '.join(map(repr, values))}"
            )


def read_num_layers(reader: ConfigReader) -> int:
    """Return the number of layers, bounded so that readers may count up to it."""
    return reader.positive("num_hidden_layers", most=MAX_LAYERS)


def read_num_experts(reader: ConfigReader) -> int:
    """Return the number of experts: transformers renamed the key between versions, in both directions."""
    key = "num_local_experts" if "num_local_experts" in reader.raw else "num_experts"
    return reader.positive(key)


def read_dense_layers(reader: ConfigReader) -> tuple[int, ...]:
    """Return the layers without experts: those listed, and all but every `decoder_sparse_step`-th (Qwen)."""
    listed = reader.raw.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer_idx, int) for layer_idx in listed):
        raise reader.error(f"'mlp_only_layers' is {truncated_repr(listed)}, where a list of layer numbers is expected")
    step, dense = reader.positive("decoder_sparse_step", 1), set(listed)
    return tuple(
        layer_idx for layer_idx in range(read_num_layers(reader)) if layer_idx in dense or (layer_idx + 1) % step
    )


def read_sliding_layers(reader: ConfigReader) -> tuple[bool, ...] | None:
    """Return of each layer whether it has the sliding window; None: the config does not list them.

    Raises: CheckpointError if a layer is of another kind.
    """
    return read_layer_types(reader, _SLIDING)


def read_layer_types(
    reader: ConfigReader, kinds: Mapping[str, _Kind], key: str = "layer_types"
) -> tuple[_Kind, ...] | None:
    """Return of each layer what its kind stands for in `kinds`; None: the config does not list them under `key`.

    Raises: CheckpointError if a layer is of another kind.
    """
    listed = reader.raw.get(key)
    if listed is None:
        return None
    if not isinstance(listed, list) or len(listed) != read_num_layers(reader):
        raise reader.error(f"{key!r} is {truncated_repr(listed)}, where a list with one for each layer is expected")
    unknown = [kind for kind in listed if not isinstance(kind, str) or kind not in kinds]
    if unknown:
        raise reader.error(f"a layer is {truncated_repr(unknown[0])}; supported are {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in listed)


def with_sliding_layers(config: ModelConfig, window: int, is_sliding: Sequence[bool]) -> ModelConfig:
    """Return a config with a sliding window for those layers; rotary positions are common."""
    if all(is_sliding):
        return config.with_fields(sliding_window=window)
    if not any(is_sliding):
        return config
    kinds = tuple(AttentionKind(config.attention.rope, window if slides else None) for slides in is_sliding)
    return config.with_fields(layer_kinds=kinds)


def _read_head_dim(reader: ConfigReader, default: int) -> int:
    head_dim = reader.positive("head_dim", default)
    if head_dim % 2:
        raise reader.error(f"a head has {head_dim} dimensions, where rotary positions need an even number")
    return head_dim


def _read_activation(reader: ConfigReader) -> HiddenAct:
    activation = reader.get(str, "hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise reader.error(f"'hidden_act' is {truncated_repr(activation)}, where only 'silu' is supported")
    return _ACTIVATIONS[activation]
