"""From a checkpoint to a model in memory: the file's tensors are checked against the model's, then loaded.

Several threads read weights in pieces and pack them in place. Memory holds the model and a few pieces, and the file is
read once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from moeflow.checkpoint.checkpoint import FLOATS, Checkpoint, StoredRows, TensorInfo
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.out_of_memory import out_of_memory_as
from moeflow.core.units import MIB, format_bytes
from moeflow.kernels.arrays import copy_into, is_in_main_memory
from moeflow.kernels.cpu.latent_weights import PackedUpProjection
from moeflow.kernels.cpu.packed_weight import PackedRows
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.triton.planar_rows import PlanarRows
from moeflow.models.finite import check_finite, check_small_weights
from moeflow.models.importance import NO_IMPORTANCE, Importance
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.rearranged import Rearranged
from moeflow.models.layers.weight_allocator import WeightAllocator, shapes_only
from moeflow.models.registry import find_family, read_model_config

if TYPE_CHECKING:
    from moeflow.models.language_model import LanguageModel
    from moeflow.pipeline.devices.staging import Staging

with on_demand(__name__):
    from moeflow.pipeline.devices import staging

_LISTED = 3
_CHECK_CONFIG = "Check that config.json belongs to these weights, or download the model again"
_PIECE_BYTES = MIB  # of the file: stays in a core's cache between reading and packing
_WHOLE = 1 << 62  # bytes of a piece that holds any tensor
_COPIED_BYTES = 4 * MIB  # of the file, for a GPU: more would leave shared caches, less would keep Python busy
_PIECE_ROWS = 16  # a packed matrix stores a multiple of these


def load_model(
    checkpoint: Checkpoint,
    allocator: WeightAllocator,
    *,
    num_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
    importance: Importance = NO_IMPORTANCE,
) -> LanguageModel:
    """Return the model with its weights as `allocator` has them; memory that is filled already is taken as it is.

    `progress(bytes_done, bytes_total)` is called from this thread after each piece; bytes are those of the file.
    `importance` is for formats whose blocks are searched for.

    Raises: CheckpointError, before anything is allocated, if tensors are missing, surplus or of another shape than
    the config says, and later if a number is not finite; CapacityError if the weights do not fit into the device's
    memory.
    """
    family = find_family(checkpoint)
    if allocator.is_filled:
        config = read_model_config(checkpoint)
        with _enough_memory(config, allocator):
            model = family.build(config, allocator)
        check_small_weights(model, checkpoint)
        return model
    config = outline(checkpoint).config
    with _enough_memory(config, allocator):
        model = family.build(config, allocator)
        with _staging_for(allocator) as buffers:
            fill_in_threads(checkpoint, model.named_weights(), num_threads, progress, importance, buffers)
    return model


@contextmanager
def _staging_for(allocator: WeightAllocator) -> Iterator[Staging | None]:
    """Return a `with` block with buffers for copies to the weights' GPU; None: they are in main memory."""
    device = allocator.device
    if device is None or torch.device(device).type == "cpu":
        yield None
        return
    found, num_threads = staging.Staging(torch.device(device)), torch.get_num_threads()
    torch.set_num_threads(1)  # of each thread that copies: teams of all cores would wait for each other
    try:
        with found.copying():
            yield found
    finally:
        torch.set_num_threads(num_threads)


def load_causal_lm(
    checkpoint: Checkpoint,
    allocator: WeightAllocator,
    *,
    num_threads: int = 1,
    progress: Callable[[int, int], None] | None = None,
    importance: Importance = NO_IMPORTANCE,
) -> CausalLM:
    """Do as `load_model` for who needs a decoder-only model. Raises: ConfigError if it is none; else likewise."""
    if read_model_config(checkpoint).encoder is not None:
        raise not_decoder_only(checkpoint)
    model = load_model(checkpoint, allocator, num_threads=num_threads, progress=progress, importance=importance)
    assert isinstance(model, CausalLM)
    return model


def not_decoder_only(checkpoint: Checkpoint) -> ConfigError:
    """Make the error for an encoder-decoder where that does not do."""
    return ConfigError(f"{checkpoint.path} is an encoder-decoder, where a decoder-only model is needed")


def outline(checkpoint: Checkpoint) -> LanguageModel:
    """Return the model that a checkpoint holds, in shapes only.

    Raises: CheckpointError if tensors are missing, surplus or of another shape than the config says, or if two copies
    of a table differ.
    """
    model = find_family(checkpoint).build(read_model_config(checkpoint), shapes_only())
    _check_tensors(checkpoint, model)
    _check_copies(checkpoint, model)
    return model


class NamesApart(msgspec.Struct, frozen=True):
    """Tensors that are kept in formats of their own, as a model's family names them."""

    routers: frozenset[str]
    embeddings: frozenset[str]  # and the output projection; not all have to be there
    layers: tuple[Mapping[str, Sequence[str]], ...]  # by the fields of `LayerFormats`; of decoders


def names_apart(checkpoint: Checkpoint) -> NamesApart:
    """Return which tensors are routers, and which embeddings. Raises: CheckpointError if a router is missing."""
    model = find_family(checkpoint).build(read_model_config(checkpoint), shapes_only())
    routers = frozenset(name for prefix, block in model.moe_blocks() for name in block.names_of_routers(prefix))
    missing = sorted(routers - checkpoint.tensors.keys())
    if missing:
        raise _blame(checkpoint.path, missing, "missing")
    layers = model.layers if isinstance(model, CausalLM) else ()
    return NamesApart(
        routers,
        frozenset(model.embedding_names),
        tuple(layer.matrix_names(f"model.layers.{number}") for number, layer in enumerate(layers)),
    )


def _check_tensors(checkpoint: Checkpoint, model: LanguageModel) -> None:
    needed = {name: tuple(view.shape) for name, view in model.named_weights()}
    missing = [name for name in needed if name not in checkpoint.tensors]
    if missing:
        raise _blame(checkpoint.path, missing, "missing")
    unused = model.config.unused_prefixes
    surplus = [
        name
        for name in checkpoint.tensors
        if name not in needed and name not in model.copies and not name.startswith(unused)
    ]
    if surplus:
        raise _blame(checkpoint.tensors[surplus[0]].file, surplus, "not part of the model that config.json describes")
    for name, shape in needed.items():
        info = checkpoint.tensors[name]
        if info.shape != shape:
            raise CheckpointError(
                f"has the shape {list(info.shape)}, where config.json makes it {list(shape)}",
                file=info.file,
                tensor=name,
                remedy=_CHECK_CONFIG,
            )


def _check_copies(checkpoint: Checkpoint, model: LanguageModel) -> None:
    for name in model.copies.keys() & checkpoint.tensors.keys():
        original = model.copies[name]
        if not torch.equal(checkpoint.read(name), checkpoint.read(original)):
            raise CheckpointError(
                f"differs from {original}, where this family has one table for both",
                file=checkpoint.tensors[name].file,
                tensor=name,
                remedy="Take the model with one table of embeddings, as it is published",
            )


def _blame(file: Path, names: list[str], problem: str) -> CheckpointError:
    if len(names) == 1:
        return CheckpointError(f"is {problem}", file=file, tensor=names[0], remedy=_CHECK_CONFIG)
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(names[1:_LISTED]) + more
    return CheckpointError(f"is {problem}; so are {listed}", file=file, tensor=names[0], remedy=_CHECK_CONFIG)


def _enough_memory(config: ModelConfig, allocator: WeightAllocator) -> AbstractContextManager[None]:
    """Return a `with` block that raises CapacityError for a lack of memory."""
    need = format_bytes(int(config.num_parameters * allocator.bits_per_value / 8))
    return out_of_memory_as(
        f"The weights need {need} on {allocator.device or 'cpu'}, which cannot be allocated; "
        "take a smaller model or a smaller format of weights"
    )


class _LoadPiece(msgspec.Struct, frozen=True):
    """What one thread takes over at a time: a tensor, or of one that is packed some rows."""

    name: str
    destination: Destination
    start: int
    stop: int
    num_bytes: int  # in the file


def fill(
    checkpoint: Checkpoint, named_weights: Iterable[tuple[str, Destination]], importance: Importance = NO_IMPORTANCE
) -> None:
    """Fill some destinations with the tensors of these names, in the calling thread. Raises: CheckpointError."""
    for piece in _pieces(checkpoint, named_weights):
        _take_over(checkpoint, piece, importance)


def _pieces(checkpoint: Checkpoint, named_weights: Iterable[tuple[str, Destination]]) -> Iterator[_LoadPiece]:
    for name, destination in named_weights:
        info = checkpoint.tensors[name]
        piece_bytes = _piece_bytes(destination, info)
        if not piece_bytes:
            yield _LoadPiece(name, destination, 0, destination.shape[0], info.num_bytes)
            continue
        row_bytes = info.num_bytes // max(info.shape[0], 1)
        step = max(piece_bytes // max(row_bytes * _PIECE_ROWS, 1), 1) * _PIECE_ROWS
        first = destination.first if isinstance(destination, PackedRows) else 0
        last = first + destination.shape[0]
        for start in range(first, last, step):
            stop = min(start + step, last)
            yield _LoadPiece(name, destination, start, stop, (stop - start) * row_bytes)


def _piece_bytes(destination: Destination, info: TensorInfo) -> int:
    """Return the size of the pieces in which a tensor is read as it lies in the file; 0: it is read whole."""
    if isinstance(destination, PackedRows):
        return _PIECE_BYTES
    if isinstance(destination, PlanarRows):
        return _PIECE_BYTES if destination.keeps(info.stored_as) else 0
    if isinstance(destination, Rearranged):
        return _WHOLE if destination.keeps(info.stored_as) else 0
    if isinstance(destination, PackedUpProjection) or is_in_main_memory(destination):
        return 0
    return _COPIED_BYTES if len(info.shape) == 2 and info.stored_as in FLOATS else 0


def fill_in_threads(
    checkpoint: Checkpoint,
    named_weights: Iterable[tuple[str, Destination]],
    num_threads: int,
    progress: Callable[[int, int], None] | None = None,
    importance: Importance = NO_IMPORTANCE,
    buffers: Staging | None = None,
) -> None:
    """Do the same in so many threads; `progress` as in `load_model`. Raises: CheckpointError.

    `buffers` are for destinations on a GPU.
    """
    progress = progress or _ignore
    pieces = list(_pieces(checkpoint, named_weights))
    bytes_total = sum(piece.num_bytes for piece in pieces)
    bytes_done = 0
    has_failed = threading.Event()

    def take_over(piece: _LoadPiece) -> int:
        if has_failed.is_set():  # in another thread; pieces after the failed one are skipped
            return 0
        try:
            return _take_over(checkpoint, piece, importance, buffers)
        except BaseException:
            has_failed.set()
            raise

    with ThreadPoolExecutor(num_threads) as threads:
        try:
            for num_bytes in threads.map(take_over, pieces):
                bytes_done += num_bytes
                progress(bytes_done, bytes_total)
        except BaseException:  # also Ctrl-C: queued pieces would still be read
            threads.shutdown(cancel_futures=True)
            raise


def _take_over(
    checkpoint: Checkpoint, piece: _LoadPiece, importance: Importance, buffers: Staging | None = None
) -> int:
    name, destination = piece.name, piece.destination
    with nullcontext() if buffers is None else buffers.on_stream():
        copy = copy_into if buffers is None else buffers.copy
        if _piece_bytes(destination, checkpoint.tensors[name]):
            stored = _read_rows(checkpoint, piece)
            if isinstance(destination, PackedRows):
                destination.fill(stored.values, stored.numbers, stored.block_kind, importance.get(name))
            elif isinstance(destination, PlanarRows | Rearranged):
                destination.fill(stored.values, stored.numbers, stored.block_kind, copy)
            else:
                assert isinstance(destination, torch.Tensor), "others are read whole"
                _copy_rows(destination, stored, copy)
            return piece.num_bytes
        values = _read(checkpoint, name)
        if isinstance(destination, PlanarRows | Rearranged):
            destination.fill(values, np.arange(len(values)), copy=copy)
        elif isinstance(destination, PackedUpProjection):
            destination.fill(values)
        elif is_in_main_memory(destination):
            copy_into(destination, values)
        else:
            assert isinstance(destination, torch.Tensor), "packed rows are read in pieces"
            copy(destination, values)
    return piece.num_bytes


def _read_rows(checkpoint: Checkpoint, piece: _LoadPiece) -> StoredRows:
    stored = checkpoint.read_rows(piece.name, piece.start, piece.stop)
    check_finite(stored.values, piece.name, checkpoint, stored.block_kind)
    return stored


def _copy_rows(
    destination: torch.Tensor, stored: StoredRows, copy: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Copy rows to their places. Neighbours in both go at once."""
    numbers = stored.numbers
    starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
    for start, stop in itertools.pairwise(starts):
        place = int(numbers[start])
        copy(destination[place : place + stop - start], stored.values[start:stop])


def _read(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    found = checkpoint.read(name)
    check_finite(found, name, checkpoint)
    return found


def _ignore(bytes_done: int, bytes_total: int) -> None:
    """Progress that is ignored."""
