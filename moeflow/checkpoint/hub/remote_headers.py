"""A model on a hub as far as plans look at it: its small files, and files of weights with nothing but their headers.

They have their full size, but are sparse after the header. What opens a checkpoint opens such a folder,
or file, too, and what reads headers only, as plans do, finds the same in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeflow.checkpoint.gguf.file_names import parse_part_name
from moeflow.checkpoint.gguf.header import gguf_header_bytes
from moeflow.checkpoint.hub.file_choice import choose_files, shards_of
from moeflow.checkpoint.hub.model_name import ModelName
from moeflow.checkpoint.json_file import MAX_INDEX_BYTES, parse_json_object
from moeflow.core.errors import HubError
from moeflow.core.units import KIB, MIB
from moeflow.kernels.on_demand import on_demand

if TYPE_CHECKING:
    from moeflow.checkpoint.hub.hub_client import Repository

with on_demand(__name__):
    from moeflow.checkpoint.hub import hub_client

HEADERS_PREFIX: Final = "moeflow-headers-"  # of folders with headers alone

_NUM_CONNECTIONS: Final = 8
_MAX_SMALL_BYTES: Final = MIB  # of a file that a plan may look at; tokenizers have more
_LENGTH_BYTES: Final = 8  # of a safetensors header's length
_FIRST_BYTES: Final = 256 * KIB  # of a file of weights without vocabulary, which mostly have its header
_MAX_HEADER_BYTES: Final = 256 * MIB  # the longest known ones hold vocabularies, about 10


@contextmanager
def remote_headers(name: ModelName) -> Iterator[Path]:
    """Yield a folder or GGUF file as a plan needs it of a model on a hub; it is gone after the block.

    Blocks: on the network, for a few megabytes. Raises: HubError, CheckpointError.
    """
    repository = hub_client.list_repository(name)
    with tempfile.TemporaryDirectory(prefix=HEADERS_PREFIX) as folder:
        yield _write_headers(repository, Path(folder, name.repo.rpartition("/")[2]))


def _write_headers(repository: Repository, folder: Path) -> Path:
    name = repository.name
    choice = choose_files(name, repository.files)
    if choice.is_gguf:
        folder.mkdir()
        places = [folder / Path(path).name for path in choice.weights]
        with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
            list(pool.map(lambda path, place: _write_gguf(repository, path, place), choice.weights, places))
        return places[0]
    small = [path for path in choice.small if repository.files[path].num_bytes <= _MAX_SMALL_BYTES]
    for path in small:
        _write(folder / path, hub_client.read_range(repository, path, 0, _MAX_SMALL_BYTES))
    weights = choice.weights
    if choice.index is not None:
        index = hub_client.read_range(repository, choice.index, 0, MAX_INDEX_BYTES)
        weights = shards_of(parse_json_object(index, folder / choice.index), name)
        _write(folder / choice.index, index)
    with ThreadPoolExecutor(_NUM_CONNECTIONS) as pool:
        list(pool.map(lambda path: _write_safetensors(repository, path, folder / path), weights))
    return folder


def _write_safetensors(repository: Repository, path: str, file: Path) -> None:
    if path not in repository.files:
        return  # opening the folder reports missing files
    data = hub_client.read_range(repository, path, 0, _FIRST_BYTES)
    length = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if _FIRST_BYTES < length <= _MAX_HEADER_BYTES:
        data += hub_client.read_range(repository, path, len(data), length)
    _write(file, data, repository.files[path].num_bytes)


def _write_gguf(repository: Repository, path: str, file: Path) -> None:
    num_bytes = repository.files[path].num_bytes
    part = parse_part_name(path)
    data, more = b"", MIB if part is None or part.number == 1 else _FIRST_BYTES  # the first has the vocabulary
    while len(data) < min(num_bytes, _MAX_HEADER_BYTES):
        data += hub_client.read_range(repository, path, len(data), len(data) + more)
        _write(file, data)
        if gguf_header_bytes(file) is not None:
            _write(file, data, num_bytes)
            return
        more = len(data)
    raise HubError(f"{path} of {repository.name} has no GGUF header in its first {len(data)} bytes. Take another file")


def _write(file: Path, data: bytes, num_bytes: int = 0) -> None:
    """Write the beginning of a file; it has `num_bytes` in all, where that is more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        stream.write(data)
        stream.truncate(max(num_bytes, len(data)))
