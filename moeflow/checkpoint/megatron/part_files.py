"""Finds the files of a model that Megatron or DeepSpeed saved, by their names.

Megatron has a folder for each tensor-parallel rank, DeepSpeed a file for each rank and one for each expert.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from moeflow.checkpoint.file_errors import blame_file
from moeflow.checkpoint.json_file import read_json_object
from moeflow.checkpoint.regular_file import read_whole
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

_RANK_FOLDER: Final = re.compile(r"mp_rank_(\d{2,4})")
_STAGE_FOLDER: Final = re.compile(r"mp_rank_\d{2,4}(?:_\d+){1,2}")  # of a stage, an expert-parallel rank, or both
_IN_RANK_FOLDER: Final = ("model_rng.pt", "model_optim_rng.pt")
_RANK_FILE: Final = re.compile(r"mp_rank_(\d{2,4})_model_states\.pt")
_EXPERT_FILE: Final = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_(\d{2,4})_model_states\.pt")
_MODELSCOPE_FOLDER: Final = "model"
_MODELSCOPE_TYPE: Final = "gpt-moe"
_LATEST: Final = {"latest": "{}", "latest_checkpointed_iteration.txt": "iter_{:0>7}"}  # file -> the folder it names
_MAX_NAME_BYTES: Final = 256


class PartFiles(msgspec.Struct):
    """The files of one tensor-parallel rank."""

    main: Path
    experts: list[Path] = []


def is_megatron_folder(path: Path) -> bool:
    """Return whether a folder holds such files, and no model in Hugging Face form. Raises: CheckpointError."""
    with blame_file(path):
        if not any(True for _ in _folders_with_parts(path)):
            return False
    config = path / "config.json"
    return not os.path.lexists(config) or read_json_object(config).get("model_type") == _MODELSCOPE_TYPE


def find_part_files(path: Path) -> list[PartFiles]:
    """Return the files of all ranks, in order. Raises: CheckpointError if one between them is missing."""
    with blame_file(path):
        folder = next(_folders_with_parts(path))
        names = sorted(entry.name for entry in folder.iterdir())
    if any(map(_STAGE_FOLDER.fullmatch, names)):
        raise CheckpointError(
            "has the layers of pipeline stages, or the experts of expert-parallel ranks, in files of their own",
            file=folder,
            remedy=(
                "Merge them with Megatron's tools (--target-pipeline-parallel-size 1 --target-expert-parallel-size 1)"
            ),
        )
    found: dict[int, PartFiles] = {}
    for name in names:
        if it := _RANK_FILE.fullmatch(name):
            found[int(it[1])] = PartFiles(folder / name)
        elif it := _RANK_FOLDER.fullmatch(name):
            found[int(it[1])] = PartFiles(_in_rank_folder(folder / name))
    missing = next((rank for rank in range(len(found)) if rank not in found), None)
    if missing is not None:
        raise missing_rank(folder, missing)
    for name in names:
        if it := _EXPERT_FILE.fullmatch(name):
            if int(it[1]) not in found:
                raise missing_rank(folder, int(it[1]))
            found[int(it[1])].experts.append(folder / name)
    return [found[rank] for rank in range(len(found))]


def missing_rank(folder: Path, rank: int) -> CheckpointError:
    """Return the error for a rank without files."""
    return CheckpointError(
        f"is without the part of tensor-parallel rank {rank} (mp_rank_{rank:02})",
        file=folder,
        remedy="Download the parts of all ranks into the same folder",
    )


def wrong_ranks(folder: Path, num_named: int, num_found: int) -> CheckpointError:
    """Return the error for other ranks than the arguments name."""
    if num_named > num_found:
        return missing_rank(folder, num_found)
    return CheckpointError(
        f"has the parts of {num_found} tensor-parallel ranks, where its arguments name {num_named}",
        file=folder,
        remedy="Leave the parts of one save in the folder",
    )


def _folders_with_parts(path: Path) -> Iterator[Path]:
    for folder in (path, path / _MODELSCOPE_FOLDER, *_latest_folders(path)):
        if folder.is_dir() and any(map(_is_part, folder.iterdir())):
            yield folder


def _is_part(entry: Path) -> bool:
    patterns = (_RANK_FILE, _RANK_FOLDER, _STAGE_FOLDER)
    return any(pattern.fullmatch(entry.name) for pattern in patterns)


def _latest_folders(path: Path) -> Iterator[Path]:
    """Yield the folder of the last save, if a file names it."""
    for name, form in _LATEST.items():
        if os.path.lexists(path / name):
            tag = read_whole(path / name, _MAX_NAME_BYTES).decode(errors="replace").strip()
            if tag != Path(tag).name or tag == ".." or "\0" in tag:
                raise CheckpointError(f"names {truncated_repr(tag)}, no folder", file=path / name, remedy="Correct it")
            yield path / (form.format(tag) if tag != "release" else tag)


def _in_rank_folder(folder: Path) -> Path:
    found = [folder / name for name in _IN_RANK_FOLDER if os.path.lexists(folder / name)]
    if len(found) != 1:
        raise CheckpointError(
            f"holds {len(found)} of {' and '.join(_IN_RANK_FOLDER)}, where one is expected",
            file=folder,
            remedy="Download the folder again, or leave one of these files in it",
        )
    return found[0]
