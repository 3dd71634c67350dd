"""A student as a Hugging Face folder: a Llama that transformers and moeflow load, with the target's tokenizer."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.safetensors.writer import weight_bytes, write_json, write_safetensors
from moeflow.core.units import MIB
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.train.speculators.student import Student

_CARRIED_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKENIZER_BYTES: Final = 16 * MIB


def save_student(student: Student, target: Checkpoint, folder: Path, *, overwrite: bool) -> None:
    """Write the student in bfloat16; the folder appears whole or not at all.

    Raises: ConfigError if the place is taken or cannot be written to, CapacityError if the disk has no room.
    """
    shapes = {name: tuple(weight.shape) for name, weight in student.weights.items()}
    need_bytes = weight_bytes(shapes) + _TOKENIZER_BYTES
    with build_folder(folder, need_bytes=need_bytes, overwrite=overwrite) as building:
        Tokenizer.load(target.path).save(building)
        write_json(building / "config.json", config_of(student, target))
        stored = ((name, weight.detach().to(torch.bfloat16)) for name, weight in student.weights.items())
        write_safetensors(building, shapes, stored)


def load_student(student: Student, folder: Path) -> Student:
    """Return the weights of a student of this shape that was saved. Raises: CheckpointError."""
    with closing(open_checkpoint(folder)) as checkpoint:
        return replace(student, weights={name: checkpoint.read(name).float() for name in student.weights})


def config_of(student: Student, target: Checkpoint) -> dict[str, Any]:
    """Return `config.json`: every size is written out; how positions turn is as the target has it."""
    shape, source = student.shape, target.config
    if source.get("rope_parameters"):
        rope: dict[str, Any] = {"rope_parameters": {**source["rope_parameters"], "rope_theta": shape.rope.theta}}
    else:
        rope = {"rope_theta": shape.rope.theta, "rope_scaling": source.get("rope_scaling")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "hidden_act": shape.hidden_act,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "attention_bias": shape.attention_bias,
        "mlp_bias": shape.mlp_bias,
        **rope,
        **{key: source[key] for key in _CARRIED_KEYS if source.get(key) is not None},
        "attention_dropout": 0.0,
        "use_cache": True,
        "dtype": "bfloat16",
    }
