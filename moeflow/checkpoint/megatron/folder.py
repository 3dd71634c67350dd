"""A model as Megatron or DeepSpeed saves it, the parts of tensor-parallel ranks merged."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from moeflow.checkpoint.checkpoint import StoredRows, TensorInfo, TensorTable, commonest_dtype
from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, known_tensor
from moeflow.checkpoint.json_file import read_json_object
from moeflow.checkpoint.kept_matrices import KeptMatrices
from moeflow.checkpoint.megatron.layout import Place, find_places, third_of
from moeflow.checkpoint.megatron.part_files import find_part_files, wrong_ranks
from moeflow.checkpoint.megatron.settings import num_ranks, read_arguments, translate
from moeflow.checkpoint.megatron.stored_parts import StoredParts, missing_parts, read_parts, read_version
from moeflow.checkpoint.tensor_file import read_tensor_file, stored_as
from moeflow.core.errors import CheckpointError
from moeflow.kernels.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_EMBEDDINGS, _POSITIONS, _HEAD = "model.embed_tokens.weight", "model.embed_positions.weight", "lm_head.weight"
_GATE: Final = re.compile(r"model\.layers\.(\d{1,6})\.mlp\.gate\.weight")


class MegatronFolder:
    """A `Checkpoint` in such a folder."""

    def __init__(self, path: Path) -> None:
        """Map all files.

        Raises: CheckpointError, naming file, tensor and remedy, if one is missing, holds anything but data, or parts
        do not match.
        """
        self.path = path
        ranks = find_part_files(path)
        stored = [read_tensor_file(rank.main) for rank in ranks]
        first, config_json = stored[0], path / "config.json"
        config = _read_json(config_json)
        self.config_file = config_json if config and first.get("args") is None else ranks[0].main
        arguments = read_arguments(first, config, self.config_file)
        if (number := num_ranks(arguments, len(ranks))) != len(ranks):
            raise wrong_ranks(path, number, len(ranks))
        self._num_ranks, self._version = len(ranks), read_version(first, ranks[0].main)
        self._places: dict[str, tuple[Place, StoredParts]] = {}
        for stored_name, parts in read_parts(ranks, stored).items():
            self._places |= {place.name: (place, parts) for place in find_places(stored_name)}
        self.config: Mapping[str, Any] = translate(arguments) | self._facts()
        self.generation_config: Mapping[str, Any] = _read_json(path / "generation_config.json")
        self._places = {name: (self._uncut(*found), found[1]) for name, found in self._places.items()}
        self._check_experts()
        self.tensors = TensorTable({name: self._info(name) for name in self._places})
        self.dtype: str = commonest_dtype(self.tensors.values())
        self._matrices = KeptMatrices(self.read)

    def read(self, name: str) -> Tensor:
        """Return a tensor on the CPU; raises as `Checkpoint.read` does."""
        place, (tensors, _) = known_tensor(self._places, name, self.path)
        if place.third is not None:
            tensors = [third_of(part, place.third, self._heads_of(tensors), self._version) for part in tensors]
        return tensors[0].clone() if place.cut_axis is None else torch.cat(tensors, dim=place.cut_axis)

    def read_rows(self, name: str, start: int, stop: int) -> StoredRows:
        """Return rows of a matrix; raises as `Checkpoint.read` does."""
        return self._matrices.rows(name, start, stop)

    def close(self) -> None:
        """Release the files."""
        self._matrices.clear()
        self._places.clear()

    def _facts(self) -> dict[str, Any]:
        """Return the settings that tensors tell."""
        found = map(_GATE.fullmatch, self._places)
        gates = {int(it[1]): self._num_rows(it[0]) for it in found if it}
        if len(numbers := set(gates.values())) > 1:
            raise CheckpointError(
                f"has layers with unlike numbers of experts: {sorted(numbers)}",
                file=self.path,
                remedy="Take a model with as many experts in each of these layers",
            )
        return {
            "vocab_size": self._num_rows(_EMBEDDINGS),
            "max_position_embeddings": self._num_rows(_POSITIONS),
            "num_experts": next(iter(numbers), 0),
            "moe_layers": sorted(gates),
            "tie_word_embeddings": _HEAD not in self._places,
        }

    def _num_rows(self, name: str) -> int:
        """Return the rows of a matrix. Raises: CheckpointError if it is none."""
        info = self._info(name)
        if len(info.shape) != 2:
            raise CheckpointError("is no matrix", file=info.file, tensor=name, remedy=DOWNLOAD_AGAIN)
        return info.shape[0]

    def _uncut(self, place: Place, parts: StoredParts) -> Place:
        """Return the place as it is cut: ranks may have whole experts. Raises: CheckpointError if a part is missing."""
        axis, part = place.cut_axis, parts.tensors[0]
        if axis is None or not place.is_expert or axis >= part.dim():
            return place
        if part.shape[axis] == self.config["intermediate_size"]:
            return msgspec.structs.replace(place, cut_axis=None)
        if len(parts.tensors) < self._num_ranks:
            raise missing_parts(place.name, parts, self._num_ranks)
        return place

    def _heads_of(self, tensors: list[Tensor]) -> int:
        """Return how many heads each part has."""
        number: int = self.config["num_attention_heads"] // len(tensors)
        return number

    def _check_experts(self) -> None:
        """Raise CheckpointError if an expert has no file."""
        of_layer = [(layer, e) for layer in self.config["moe_layers"] for e in range(self.config["num_experts"])]
        for layer, expert in of_layer:
            if f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" not in self._places:
                number = self.config["moe_layers"].index(layer)
                raise CheckpointError(
                    f"has no weights of expert {expert} of layer {layer}",
                    file=self.path,
                    remedy=f"Download its file (layer_{number}_expert_{expert}_mp_rank_00_model_states.pt)",
                )

    def _info(self, name: str) -> TensorInfo:
        """Return shape and size. Raises: CheckpointError if the tensor is missing, or cut into unlike parts."""
        place, (tensors, file) = known_tensor(self._places, name, self.path)
        part, shape = tensors[0], list(tensors[0].shape)
        if place.third is not None:
            heads, rest = divmod(self.config["num_attention_heads"], len(tensors))
            if rest or not shape or shape[0] % (3 * heads):
                raise CheckpointError(
                    f"has parts of {shape}, no queries, keys and values of {heads} heads",
                    file=file,
                    tensor=name,
                    remedy=DOWNLOAD_AGAIN,
                )
            shape[0] //= 3
        if place.cut_axis is not None:
            if place.cut_axis >= len(shape):
                raise CheckpointError("is no matrix", file=file, tensor=name, remedy=DOWNLOAD_AGAIN)
            shape[place.cut_axis] *= len(tensors)
        return TensorInfo(tuple(shape), prod(shape) * part.itemsize, stored_as(part), file)


def _read_json(file: Path) -> Mapping[str, Any]:
    """Return the entries of a file; none if there is no such file. Raises: CheckpointError."""
    return read_json_object(file) if os.path.lexists(file) else {}
