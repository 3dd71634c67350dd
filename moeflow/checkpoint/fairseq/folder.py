"""A folder of a language model that fairseq trained with experts: NAME-shared.pt and NAME-rank-0.pt, NAME-rank-1.pt, ..

Each rank's file has the same number of experts of every layer, numbered from 0; those of rank 0 come first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable, commonest_dtype
from moeflow.checkpoint.fairseq.settings import read_arguments, translate
from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, blame_file, check_num_tensors, known_tensor
from moeflow.checkpoint.tensor_file import plain_floats, read_tensor_file, stored_as
from moeflow.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SHARED_SUFFIX: Final = "-shared.pt"
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"moe_layer\.experts\.(\d{1,6})\.(fc1|fc2)\.(weight|bias)")
_COMPUTED: Final = re.compile(r"decoder\.(version|embed_positions\.(_float_tensor|weights))")
_EMBEDDINGS, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ENDS: Final = {
    "decoder.embed_tokens.weight": _EMBEDDINGS,
    "decoder.embed_positions.weight": "model.embed_positions.weight",
    "decoder.layer_norm.weight": "model.norm.weight",
    "decoder.layer_norm.bias": "model.norm.bias",
    "decoder.output_projection.weight": _HEAD,
}
_IN_LAYER: Final = {
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "moe_layer.gate.wg": "mlp.gate",
}
_EXPERT_PARTS: Final = {"fc1": "up_proj", "fc2": "down_proj"}


class FairseqFolder:
    """A `Checkpoint` in such a folder."""

    def __init__(self, path: Path) -> None:
        """Map all files.

        Raises: CheckpointError, naming file, tensor and remedy, if one is missing, holds anything but data, or tensors
        do not match.
        """
        self.path = path
        self.config_file = shared = _find_shared(path)
        stored = read_tensor_file(shared)
        self._tensors: dict[str, tuple[Tensor, Path]] = {}
        self._take(_weights(stored, shared), shared, first_expert=0)
        per_rank: set[int] = set()
        ranks = _find_ranks(shared)
        for rank, file in enumerate(ranks):
            weights = _weights(read_tensor_file(file), file)
            count = _num_experts(weights)
            per_rank.add(count)
            self._take(weights, file, first_expert=rank * count)
        if len(per_rank) > 1:
            raise CheckpointError("has files of ranks with unlike numbers of experts", file=path, remedy=DOWNLOAD_AGAIN)
        vocab_size = self._shape_of(_EMBEDDINGS)[0]
        num_experts = len(ranks) * next(iter(per_rank), 0)
        self.config: Mapping[str, Any] = translate(read_arguments(stored, shared), vocab_size, num_experts, shared)
        self.generation_config: Mapping[str, Any] = {}
        if self.config["tie_word_embeddings"]:
            self._drop_second_name()
        self.tensors = TensorTable(
            {
                name: TensorInfo(tuple(tensor.shape), tensor.nbytes, stored_as(tensor), file)
                for name, (tensor, file) in self._tensors.items()
            }
        )
        self.dtype: str = commonest_dtype(self.tensors.values())

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; raises as `Checkpoint.read` does."""
        return self._tensor(name).clone()

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix; raises as `Checkpoint.read` does."""
        return StoredRows(self._tensor(name)[start:stop].contiguous(), np.arange(start, stop))

    def close(self) -> None:
        """Release the files."""
        self._tensors.clear()

    def _tensor(self, name: str) -> Tensor:
        return known_tensor(self._tensors, name, self.path)[0]

    def _drop_second_name(self) -> None:
        """Keep the embeddings once if the output projection is the same tensor, as fairseq saves tied models."""
        head, table = self._tensors.get(_HEAD), self._tensors[_EMBEDDINGS]
        if head is not None and head[0].is_set_to(table[0]):
            del self._tensors[_HEAD]

    def _shape_of(self, name: str) -> tuple[int, ...]:
        shape = tuple(self._tensor(name).shape)
        if len(shape) != 2:
            raise CheckpointError("is no matrix", file=self.path, tensor=name, remedy=DOWNLOAD_AGAIN)
        return shape

    def _take(self, weights: Mapping[str, Tensor], file: Path, first_expert: int) -> None:
        for stored_name, tensor in weights.items():
            if _COMPUTED.fullmatch(stored_name):
                continue
            name = _known_name(stored_name, first_expert)
            if name in self._tensors:
                raise CheckpointError(
                    f"is also in {self._tensors[name][1].name}", file=file, tensor=name, remedy=DOWNLOAD_AGAIN
                )
            self._tensors[name] = (plain_floats(tensor, stored_name, file), file)
        check_num_tensors(len(self._tensors), self.path)


def is_fairseq_folder(path: Path) -> bool:
    """Return whether a folder without a config.json holds experts as fairseq saves them."""
    with blame_file(path):
        return any(entry.name.endswith(SHARED_SUFFIX) for entry in path.iterdir())


def _find_shared(path: Path) -> Path:
    found = sorted(path.glob(f"*{SHARED_SUFFIX}"))
    if len(found) != 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(
            f"holds {len(found)} models: {names}", file=path, remedy="Leave the files of one in the folder"
        )
    return found[0]


def _find_ranks(shared: Path) -> list[Path]:
    """Return the files of all ranks in order. Raises: CheckpointError if one between them is missing."""
    stem = shared.name.removesuffix(SHARED_SUFFIX)
    pattern = re.compile(re.escape(stem) + r"-rank-(\d+)\.pt")
    found = {int(it[1]): file for file in shared.parent.iterdir() if (it := pattern.fullmatch(file.name))}
    missing = next((rank for rank in range(max(len(found), 1)) if rank not in found), None)
    if missing is not None:
        raise CheckpointError(
            f"is there without {stem}-rank-{missing}.pt",
            file=shared,
            remedy="Download the files of all ranks into the same folder",
        )
    return [found[rank] for rank in sorted(found)]


def _weights(stored: Mapping[str, Any], file: Path) -> Mapping[str, Tensor]:
    weights = stored.get("model")
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise CheckpointError("has no dictionary of tensors by name under 'model'", file=file, remedy=DOWNLOAD_AGAIN)
    return weights


def _num_experts(weights: Mapping[str, Tensor]) -> int:
    """Return how many experts of a layer a rank has."""
    found = (_EXPERT.search(name) for name in weights)
    return max((int(it[1]) + 1 for it in found if it), default=0)


def _known_name(stored_name: str, first_expert: int) -> str:
    """Return the name that a tensor has in Hugging Face's terms; its own if it is unknown."""
    found = _LAYER.fullmatch(stored_name)
    if found is None:
        return _ENDS.get(stored_name, stored_name)
    prefix, part = f"model.layers.{found[1]}", found[2]
    expert = _EXPERT.fullmatch(part)
    if expert:
        return f"{prefix}.mlp.experts.{first_expert + int(expert[1])}.{_EXPERT_PARTS[expert[2]]}.{expert[3]}"
    module, _, kind = part.rpartition(".")
    return f"{prefix}.{_IN_LAYER[module]}.{kind}" if module in _IN_LAYER else stored_name
