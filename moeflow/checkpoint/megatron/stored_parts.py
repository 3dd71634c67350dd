"""The stored tensors of all files of a model, and the parts of each that tensor-parallel ranks have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN, check_num_tensors
from moeflow.checkpoint.megatron.part_files import PartFiles
from moeflow.checkpoint.tensor_file import plain_floats, plain_setting, read_tensor_file
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS: Final = ("module", "model")  # entries with weights: DeepSpeed's, and Megatron's
_NO_WEIGHTS: Final = "_extra_state"  # how names of other entries end
_LONGEST_NAME: Final = 512
_VERSIONS: Final = (0, 1, 2, 3)


class StoredParts(NamedTuple):
    """The parts of a tensor, of as many ranks as have one, and the file of the first."""

    tensors: list[Tensor]
    file: Path


def read_parts(ranks: Sequence[PartFiles], stored: Sequence[Mapping[str, Any]]) -> dict[str, StoredParts]:
    """Return the parts of all tensors by their stored names, given what main files hold.

    Raises: CheckpointError if a file lacks a part that others have, or shapes differ.
    """
    found: dict[str, dict[int, tuple[Tensor, Path]]] = {}  # by stored name and rank
    for rank, (files, main) in enumerate(zip(ranks, stored, strict=True)):
        for file in (files.main, *files.experts):
            weights = _weights(main, file) if file is files.main else read_tensor_file(file)
            for name, value in _flat(weights, file):
                of_ranks = found.setdefault(name, {})
                if rank in of_ranks:
                    raise CheckpointError("is there twice", file=file, tensor=name, remedy=DOWNLOAD_AGAIN)
                of_ranks[rank] = plain_floats(value, name, file), file
            check_num_tensors(len(found), file)
    return {name: _checked(name, of_ranks, len(ranks)) for name, of_ranks in found.items()}


def read_version(stored: Mapping[str, Any], file: Path) -> float:
    """Return the version of a file's layout. Raises: CheckpointError if it is unknown."""
    is_current = _WEIGHTS[0] in stored  # DeepSpeed is younger than the last version
    version = plain_setting(stored.get("checkpoint_version", _VERSIONS[-1] if is_current else _VERSIONS[0]))
    if version not in _VERSIONS:
        raise CheckpointError(
            f"has 'checkpoint_version' {truncated_repr(version)}, where one of "
            f"{', '.join(map(str, _VERSIONS))} is expected",
            file=file,
            remedy="Save it with a known version of Megatron",
        )
    return float(version)


def _weights(stored: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    found: Any = next((stored[key] for key in _WEIGHTS if key in stored), None)
    if not isinstance(found, Mapping):
        raise CheckpointError(
            f"has no dictionary of weights under {' or '.join(map(repr, _WEIGHTS))}", file=file, remedy=DOWNLOAD_AGAIN
        )
    return found


def _flat(weights: Mapping[str, Any], file: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all entries; those of dictionaries in it under joined names.

    Raises: CheckpointError if dictionaries contain themselves, or each other so often that entries have no end.
    """
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", weights)]
    count = 0
    while waiting:
        prefix, entries = waiting.pop()
        for key, value in entries.items():
            if not isinstance(key, str):
                raise CheckpointError("has weights without names", file=file, remedy=DOWNLOAD_AGAIN)
            if len(prefix) + len(key) > _LONGEST_NAME:
                raise CheckpointError(
                    f"has weights with names of over {_LONGEST_NAME} characters", file=file, remedy=DOWNLOAD_AGAIN
                )
            count += 1
            check_num_tensors(count, file)
            if isinstance(value, Mapping):
                waiting.append((f"{prefix}{key}.", value))
            elif not key.endswith(_NO_WEIGHTS):
                yield prefix + key, value


def _checked(name: str, of_ranks: Mapping[int, tuple[Tensor, Path]], num_ranks: int) -> StoredParts:
    """Return the parts. Raises: CheckpointError for unlike parts, or for missing ones unless rank 0 has an expert."""
    parts = StoredParts([tensor for tensor, _ in of_ranks.values()], next(iter(of_ranks.values()))[1])
    if len(of_ranks) != num_ranks and not (list(of_ranks) == [0] and ".experts." in name):
        raise missing_parts(name, parts, num_ranks)
    if len(shapes := {tuple(part.shape) for part in parts.tensors}) > 1:
        raise CheckpointError(
            f"has parts of unlike shapes: {sorted(shapes)}", file=parts.file, tensor=name, remedy=DOWNLOAD_AGAIN
        )
    return parts


def missing_parts(name: str, parts: StoredParts, num_ranks: int) -> CheckpointError:
    """Return the error for a tensor that some ranks have no part of."""
    return CheckpointError(
        f"has parts of {len(parts.tensors)} of {num_ranks} tensor-parallel ranks",
        file=parts.file,
        tensor=name,
        remedy="Download the files of all ranks again",
    )
