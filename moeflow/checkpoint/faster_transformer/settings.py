"""What FasterTransformer's config.ini says of a GPT with experts, in Hugging Face's terms.

Settings that would change the arithmetic in a way that is not computed are errors.
"""

from __future__ import annotations

import configparser
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.regular_file import read_whole
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.core.units import MIB

DTYPES: Final = {"fp16": "float16", "fp32": "float32"}
_MAX_RANKS: Final = 1024
# Settings that have to be as they are by default, in lower case.
_UNSUPPORTED: Final = {
    "has_adapters": ("false", "0"),
    "has_positional_encoding": ("true", "1"),
    "has_pre_decoder_layernorm": ("false", "0"),
    "has_post_decoder_layernorm": ("true", "1"),
    "use_attention_linear_bias": ("false", "0"),
    "layernorm_type": ("pre_layernorm",),
    "activation_type": ("gelu",),
    "model_name": ("gpt",),
    "moe_k": ("1",),
}


@dataclass(frozen=True, slots=True)
class IniSettings:
    """What config.ini says."""

    config: dict[str, Any]
    dtype: str  # of all numbers
    num_ranks: int  # among which matrices are cut


def read_settings(file: Path) -> IniSettings:
    """Read config.ini. Raises: CheckpointError, naming the setting."""
    ini = configparser.ConfigParser(interpolation=None)
    try:
        ini.read_string(read_whole(file, MIB).decode())
    except (configparser.Error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"is no configuration file ({truncated(str(error))})", file=file, remedy="Convert the model again"
        ) from error
    if not ini.has_section("gpt"):
        raise CheckpointError("has no section [gpt]", file=file, remedy="Only GPT models are supported")
    gpt, structure = dict(ini["gpt"]), dict(ini["structure"]) if ini.has_section("structure") else {}
    reader = ConfigReader(_numbers(gpt) | _numbers(structure), file)
    for name, expected in _UNSUPPORTED.items():
        if name in gpt and gpt[name].lower() not in expected:
            raise reader.error(f"{name!r} is {truncated_repr(gpt[name])}, where only {expected[0]} is supported")
    dtype = gpt.get("weight_data_type", "fp32")
    if dtype not in DTYPES:
        raise reader.error(f"'weight_data_type' is {truncated_repr(dtype)}; supported are {', '.join(DTYPES)}")
    return IniSettings(
        _config(reader, structure), DTYPES[dtype], reader.positive("tensor_para_size", 1, most=_MAX_RANKS)
    )


def _config(reader: ConfigReader, structure: Mapping[str, str]) -> dict[str, Any]:
    num_heads, head_dim = reader.positive("head_num"), reader.positive("size_per_head")
    num_experts = reader.get(int, "expert_num", 0) if reader.get(int, "gpt_with_moe", 0) else 0
    try:
        moe_layers = json.loads(structure.get("moe_layers", "[]")) if num_experts else []
    except (ValueError, RecursionError) as error:
        raise reader.error(f"'moe_layers' is {truncated_repr(structure['moe_layers'])}, no list of numbers") from error
    return {
        "model_type": "gpt_moe",
        "vocab_size": reader.positive("vocab_size"),
        "hidden_size": num_heads * head_dim,
        "num_hidden_layers": reader.positive("num_layer"),
        "num_attention_heads": num_heads,
        "intermediate_size": reader.positive("inter_size"),
        "max_position_embeddings": reader.positive("max_pos_seq_len"),
        "layer_norm_eps": reader.get(float, "layernorm_eps", 1e-5),
        "activation_function": "gelu_tanh",  # its name for Gelu
        "num_experts": num_experts,
        "num_experts_per_tok": 1,
        "moe_layers": moe_layers,
        "bos_token_id": reader.get(int, "start_id", None),
        "eos_token_id": reader.get(int, "end_id", None),
    }


def _numbers(section: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with numbers as such."""
    found: dict[str, Any] = {}
    for name, text in section.items():
        try:
            found[name] = int(text)
        except ValueError:
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = text
    return found
