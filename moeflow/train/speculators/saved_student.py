"""A student as a Hugging Face folder: a Llama with the target's tokenizer, for transformers and moeflow."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.draft_vocabulary import write_draft_vocabulary
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.safetensors.writer import weight_bytes, write_json, write_safetensors
from moeflow.core.units import MIB
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.decoder_config import decoder_config
from moeflow.train.speculators.student import Student

_TOKENIZER_BYTES: Final = 16 * MIB


def save_student(student: Student, vocabulary: Tensor, target: Checkpoint, folder: Path, *, overwrite: bool) -> None:
    """Write the student in bfloat16, with its vocabulary, [v] int64. The folder appears complete or not at all.

    Raises: ConfigError if the folder exists or cannot be written to, CapacityError if the disk is full.
    """
    shapes = {name: tuple(weight.shape) for name, weight in student.weights.items()}
    need_bytes = weight_bytes(shapes) + _TOKENIZER_BYTES
    with build_folder(folder, need_bytes=need_bytes, overwrite=overwrite) as building:
        Tokenizer.load(target.path).save(building)
        write_json(building / "config.json", config_of(student, target))
        write_draft_vocabulary(building, vocabulary.tolist())
        stored = ((name, weight.detach().to(torch.bfloat16)) for name, weight in student.weights.items())
        write_safetensors(building, shapes, stored)


def load_student(student: Student, folder: Path) -> Student:
    """Return a saved student of this shape. Raises: CheckpointError."""
    with closing(open_checkpoint(folder)) as checkpoint:
        return replace(student, weights={name: checkpoint.read(name).float() for name in student.weights})


def config_of(student: Student, target: Checkpoint) -> dict[str, Any]:
    """Return `config.json`, with every size and the target's rotary embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **decoder_config(target, student.shape),
        "attention_bias": student.shape.attention.qkv_bias,
        "mlp_bias": student.shape.feed_forward.mlp_bias,
    }
