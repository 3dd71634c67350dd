"""A classifier as a Hugging Face folder: what transformers calls the weights of a Switch Transformer's encoder, and
`score.weight` and `score.bias` of the linear layer over the mean of its hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
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
from moeflow.engine.text.tokenizer import Tokenizer
from moeflow.train.classifiers.network import EPSILON, MAX_DISTANCE, NUM_BUCKETS, ClassifierShape, SwitchClassifier

EMBEDDINGS: Final = "shared.weight"
ARCHITECTURE: Final = "SwitchTransformersForSequenceClassification"
_OTHER_FILES_BYTES: Final = 16 * MIB  # tokenizer and config
_OWN_TABLE: Final = "embed.weight"


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

    Raises: ConfigError if the place is taken, CapacityError if the disk has no room.
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
            shape = ClassifierShape(
                hidden_size=config["d_model"],
                num_layers=config["num_layers"],
                num_sparse_layers=config["num_sparse_encoder_layers"],
                num_experts=config["num_experts"],
                num_heads=config["num_heads"],
                head_dim=config["d_kv"],
                ffn_size=config["d_ff"],
                num_classes=len(config["id2label"]),
            )
            labels = [str(config["id2label"][str(at)]) for at in range(shape.num_classes)]
        except KeyError as error:
            raise CheckpointError(
                f"has no {error}", file=checkpoint.config_file, remedy="Train the classifier again"
            ) from error
        weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    return shape, weights, weights.pop(EMBEDDINGS), labels


def _config(shape: ClassifierShape, vocab_size: int, labels: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "switch_transformers",
        "is_encoder_decoder": False,
        "d_model": shape.hidden_size,
        "d_kv": shape.head_dim,
        "d_ff": shape.ffn_size,
        "num_heads": shape.num_heads,
        "num_layers": shape.num_layers,
        "num_sparse_encoder_layers": shape.num_sparse_layers,
        "num_experts": shape.num_experts,
        "vocab_size": vocab_size,
        "relative_attention_num_buckets": NUM_BUCKETS,
        "relative_attention_max_distance": MAX_DISTANCE,
        "dense_act_fn": "relu",
        "layer_norm_epsilon": EPSILON,
        "router_bias": False,
        "router_jitter_noise": 0.0,
        "router_dtype": "float32",
        "expert_capacity": 10**6,  # nothing is dropped
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
        "id2label": {str(at): label for at, label in enumerate(labels)},
        "label2id": {label: at for at, label in enumerate(labels)},
    }
