"""Latent attention in GGUF files: its metadata in Hugging Face's words, and its up-projection in one piece.

llama.cpp keeps the up-projection from latents to keys and values as two stacks of matrices, a head each, that of keys
transposed: `attn_k_b` [H, L, N] and `attn_v_b` [H, V, L]. Older files have Hugging Face's one matrix. Metadata say in
the newer ones how wide keys of the latents are, and how wide each head's are in keys of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moeflow.checkpoint.checkpoint import Checkpoint, StoredRows, TensorInfo, TensorTable
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

KEYS: Final = "k_b_proj"  # as Hugging Face would have called the two
VALUES: Final = "v_b_proj"
LAYER_NAMES: Final = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": f"self_attn.{KEYS}",
    "attn_v_b": f"self_attn.{VALUES}",
}
_JOINED: Final = "kv_b_proj"
_LOG_FACTOR: Final = 0.1  # of the context's growth in the scale of scores, which files multiply by already


def latent_keys(reader: ConfigReader, num_heads: int, rope_scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a config.json says of attention; a key is missing, or contradicts another: CheckpointError."""
    rope_dim = reader.positive("rope.dimension_count")
    key_dim = reader.positive("attention.key_length_mla", reader.positive("attention.key_length"))
    if key_dim <= rope_dim:
        raise reader.error(f"keys of {key_dim} dimensions, {rope_dim} of them rotated, are not supported")
    keys: dict[str, Any] = {
        "num_key_value_heads": num_heads,
        "head_dim": rope_dim,
        "q_lora_rank": reader.positive("attention.q_lora_rank") if "attention.q_lora_rank" in reader.raw else None,
        "kv_lora_rank": reader.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": reader.positive("attention.value_length_mla", reader.positive("attention.value_length")),
        "topk_method": "group_limited_greedy" if reader.get(int, "expert_group_count", 1) > 1 else "greedy",
    }
    log_multiplier = reader.number("rope.scaling.yarn_log_multiplier", 0.0, least=0.0, most=1e6)
    if log_multiplier and rope_scaling is not None:
        mscale = round(log_multiplier / _LOG_FACTOR, 6)  # as it was before it became a float32
        keys["rope_scaling"] = rope_scaling | {"mscale": mscale, "mscale_all_dim": mscale}
    return keys


def with_joined_projections(file: Checkpoint) -> Checkpoint:
    """Return a checkpoint with one matrix for each up-projection: the file itself, if it has that layout."""
    names = [name for name in file.tensors if f".{KEYS}." in name]
    return JoinedProjections(file, names) if names else file


class JoinedProjections:
    """A `Checkpoint` whose up-projections the file has in two stacks."""

    def __init__(self, file: Checkpoint, names: list[str]) -> None:
        """Take the names of all stacks of keys. Raises: CheckpointError if one has no matching stack of values."""
        self._file = file
        self.path, self.config_file = file.path, file.config_file
        self.config, self.generation_config = file.config, file.generation_config
        self.dtype = file.dtype
        tensors = dict(file.tensors)
        self._keys: Mapping[str, str] = {name.replace(KEYS, _JOINED): name for name in names}
        for joined, name in self._keys.items():
            tensors[joined] = _joined(tensors.pop(name), tensors.pop(name.replace(KEYS, VALUES), None), name)
        self.tensors = TensorTable(tensors)

    def read(self, name: str) -> Tensor:
        """Return a tensor; raises as `Checkpoint.read` does."""
        stored = self._keys.get(name)
        if stored is None:
            return self._file.read(name)
        keys, values = self._file.read(stored).float(), self._file.read(stored.replace(KEYS, VALUES)).float()
        return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix, those of up-projections as floats; raises as `Checkpoint.read_rows` does."""
        if name not in self._keys:
            return self._file.read_rows(name, start, stop)
        return StoredRows(self.read(name)[start:stop], np.arange(start, stop))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def _joined(keys: TensorInfo, values: TensorInfo | None, name: str) -> TensorInfo:
    """Return the combination of two stacks."""
    if values is None or not _fit(keys.shape, values.shape):
        beside = "no such stack of values" if values is None else f"one of values, {list(values.shape)},"
        raise CheckpointError(
            f"is a stack of keys {list(keys.shape)} with {beside} beside it",
            file=keys.file,
            tensor=name,
            remedy="Convert or download the model again",
        )
    num_heads, latent_dim, nope_dim = keys.shape
    shape = (num_heads * (nope_dim + values.shape[1]), latent_dim)
    stored_as = keys.stored_as if keys.stored_as == values.stored_as else "float32"
    return TensorInfo(shape, keys.num_bytes + values.num_bytes, stored_as, keys.file)


def _fit(keys: tuple[int, ...], values: tuple[int, ...]) -> bool:
    return len(keys) == len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2])
