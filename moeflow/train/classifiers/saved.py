"""A classifier as a Hugging Face folder.

The weights have transformers' names for the encoder of a Switch Transformer. `score.weight` and `score.bias` are those
of the last linear layer, over the mean of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from moeflow.checkpoint.atomic_folder import build_folder
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.safetensors.writer import write_json
from moeflow.core.errors import CheckpointError
from moeflow.core.units import MIB
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.classifiers.network import EPSILON, MAX_DISTANCE, NUM_BUCKETS, ClassifierShape, SwitchClassifier

EMBEDDINGS: Final = "shared.weight"
ARCHITECTURE: Final = "SwitchTransformersForSequenceClassification"
_OTHER_FILES_BYTES: Final = 16 * MIB  # tokenizer and config
_OWN_TABLE: Final = "embed.weight"
_SIZES: Final = {  # key of config.json: field of ClassifierShape
    "d_model": "hidden_size",
    "d_kv": "head_dim",
    "d_ff": "ffn_size",
    "num_heads": "num_heads",
    "num_layers": "num_layers",
    "num_sparse_encoder_layers": "num_sparse_layers",
    "num_experts": "num_experts",
}


def save_classifier(
    network: SwitchClassifier,
    table: Tensor,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    dtype: torch.dtype,
    overwrite: bool,
    on_bytes: Callable[[int, int], None],
) -> None:
    """Write a checkpoint, or nothing. Shapes: table [vocabulary, H], the embeddings of all tokens.

    Raises: ConfigError if the folder exists, CapacityError if the disk is full.
    """
    tensors = {name: weight for name, weight in network.state_dict().items() if name != _OWN_TABLE}
    tensors = {name: weight.to(dtype).contiguous() for name, weight in (tensors | {EMBEDDINGS: table}).items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    on_bytes(0, num_bytes)
    with build_folder(folder, need_bytes=num_bytes + _OTHER_FILES_BYTES, overwrite=overwrite) as unfinished:
        tokenizer.save(unfinished)
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        write_json(unfinished / "config.json", _config(network.shape, len(table), labels, dtype))
    on_bytes(num_bytes, num_bytes)


def load_classifier(folder: Path) -> tuple[ClassifierShape, dict[str, Tensor], Tensor, list[str]]:
    """Return shape, weights without embeddings, embeddings of all tokens, and names of classes, all in float32.

    Raises: CheckpointError if there is no classifier, or a damaged one.
    """
    with closing(open_checkpoint(folder)) as checkpoint:
        config = checkpoint.config
        if ARCHITECTURE not in config.get("architectures", []):
            raise CheckpointError(
                "is no classifier with experts",
                file=checkpoint.config_file,
                remedy="Make one with `moeflow train classifier`",
            )
        try:
            labels = [str(config["id2label"][str(at)]) for at in range(len(config["id2label"]))]
            sizes = {field: config[key] for key, field in _SIZES.items()}
        except KeyError as error:
            raise CheckpointError(
                f"has no {error}", file=checkpoint.config_file, remedy="Train the classifier again"
            ) from error
        weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    return ClassifierShape(**sizes, num_classes=len(labels)), weights, weights.pop(EMBEDDINGS), labels


def _config(shape: ClassifierShape, vocab_size: int, labels: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    sizes = asdict(shape)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "switch_transformers",
        "is_encoder_decoder": False,
        **{key: sizes[field] for key, field in _SIZES.items()},
        "vocab_size": vocab_size,
        "relative_attention_num_buckets": NUM_BUCKETS,
        "relative_attention_max_distance": MAX_DISTANCE,
        "dense_act_fn": "relu",
        "layer_norm_epsilon": EPSILON,
        "router_bias": False,
        "router_jitter_noise": 0.0,
        "router_dtype": "float32",
        "expert_capacity": 10**6,  # no token is dropped
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
        "id2label": {str(at): label for at, label in enumerate(labels)},
        "label2id": {label: at for at, label in enumerate(labels)},
    }
