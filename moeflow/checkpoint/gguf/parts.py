"""The header of a GGUF model that is in several files, as one: metadata of the first, and where each tensor lies.

Each part's header has its number, the number of parts and the total number of tensors. Other keys are compared with the
first part, and with the file names. So parts of other models,
copies under wrong names and half a download are noticed before anything is computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from moeflow.checkpoint.file_errors import MAX_TENSORS, check_num_tensors
from moeflow.checkpoint.gguf.file_names import MAX_PARTS, PartName, parse_part_name
from moeflow.checkpoint.gguf.header import GGUFHeader, GGUFTensor, read_gguf_header
from moeflow.checkpoint.gguf.token_ids import TOKENS, TURN_ENDS
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr

_NUMBER: Final = "split.no"  # from 0 on
_COUNT: Final = "split.count"
_NUM_TENSORS: Final = "split.tensors.count"  # of all parts
_OWN: Final = (_NUMBER, "general.alignment")  # keys that are of a part alone
_SOUGHT: Final = {TOKENS: TURN_ENDS}  # strings that matter of a vocabulary
_DOWNLOAD_ALL: Final = "Download all parts of the model again, into one folder"


def read_gguf_parts(start: Path) -> GGUFHeader:
    """Return metadata, without vocabulary, and tensors of a model in one file, or in several from `start` on.

    Raises: CheckpointError, naming the part, if one is missing, damaged, of another model or contradicts the first.
    """
    first = read_gguf_header(start, with_vocabulary=False, sought=_SOUGHT)
    name, count = parse_part_name(start.name), _said(first, _COUNT, MAX_PARTS) if _COUNT in first.metadata else 1
    if name is None and count > 1:
        raise CheckpointError(
            f"is one of {count} parts of a model, but its name does not contain the number",
            file=start,
            remedy=f"Give the parts their names back: {PartName(start.stem, 1, count)} and so on",
        )
    if name is None or name.count == 1:
        _check_single(count, first)
        return first
    _check_place(first, name)
    tensors = dict(first.tensors)
    for number in range(2, name.count + 1):
        own_name = PartName(name.stem, number, name.count)
        part = _read_part(start.with_name(str(own_name)), start)
        _check_place(part, own_name)
        _check_metadata(part, first)
        _add(part.tensors, tensors)
    num_tensors = _said(first, _NUM_TENSORS, MAX_TENSORS)
    if len(tensors) != num_tensors:
        raise CheckpointError(
            f"states {num_tensors} tensors in all {name.count} parts, which have {len(tensors)}",
            file=start,
            remedy=_DOWNLOAD_ALL,
        )
    return GGUFHeader(start, first.metadata, tensors)


def _read_part(file: Path, start: Path) -> GGUFHeader:
    if not file.exists() and not file.is_symlink():
        raise CheckpointError(
            f"is missing: {start.name} is the first of several parts of a model, and this is another",
            file=file,
            remedy="Download all parts into one folder",
        )
    return read_gguf_header(file, with_vocabulary=False, sought=_SOUGHT)


def _check_single(count: int, header: GGUFHeader) -> None:
    if count > 1:
        raise CheckpointError(
            f"is one of {count} parts of a model by its header, and the only one by its name",
            file=header.file,
            remedy=_DOWNLOAD_ALL,
        )


def _check_place(header: GGUFHeader, name: PartName) -> None:
    """Check that a part says of itself what its name says."""
    missing = [key for key in (_NUMBER, _COUNT, _NUM_TENSORS) if key not in header.metadata]
    if missing:
        raise CheckpointError(
            f"is called part {name.number} of {name.count}, but its header has no {missing[0]}",
            file=header.file,
            remedy="If it is a whole model, call it otherwise; else: " + _DOWNLOAD_ALL,
        )
    number, count = _said(header, _NUMBER, MAX_PARTS) + 1, _said(header, _COUNT, MAX_PARTS)
    if (number, count) != (name.number, name.count):
        raise CheckpointError(
            f"is called part {name.number} of {name.count}, but is part {number} of {count} by its header",
            file=header.file,
            remedy=_DOWNLOAD_ALL,
        )


def _said(header: GGUFHeader, key: str, most: int) -> int:
    value = header.metadata[key]
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(
            f"has {key} = {truncated_repr(value)}, where a number from 0 to {most} is expected",
            file=header.file,
            remedy=_DOWNLOAD_ALL,
        )
    return value


def _check_metadata(part: GGUFHeader, first: GGUFHeader) -> None:
    """Check that a part says nothing of the model that the first does not say."""
    for key, value in part.metadata.items():
        if key not in _OWN and (key not in first.metadata or first.metadata[key] != value):
            said = truncated_repr(first.metadata[key]) if key in first.metadata else "nothing"
            raise CheckpointError(
                f"has {key} = {truncated_repr(value)}, where {first.file.name} has {said}",
                file=part.file,
                remedy="The two are not of one model. " + _DOWNLOAD_ALL,
            )


def _add(found: dict[str, GGUFTensor], tensors: dict[str, GGUFTensor]) -> None:
    """Add a part's tensors to those of the parts before it."""
    for name, tensor in found.items():
        if name in tensors:
            raise CheckpointError(
                f"is also in {tensors[name].file.name}; one of the two is wrong",
                file=tensor.file,
                tensor=name,
                remedy=_DOWNLOAD_ALL,
            )
        check_num_tensors(len(tensors) + 1, tensor.file)
        tensors[name] = tensor
