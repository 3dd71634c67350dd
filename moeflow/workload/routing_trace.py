"""Which experts every token of a run used, layer by layer: a file that grows while a model serves.

    8 bytes magic | length and CRC-32 of the description (4 bytes each) | description (JSON)
    then a record for each pass:
    tokens (u32) | tokens generated (u32) | seconds of computing (f32) | expert ids [layers, tokens, K] | CRC-32 (u32)

Ids take a byte each for up to 256 experts, two for more; in the order of the router's choice. A record is written in
one piece, and one that was cut by a crash, or anything after a damaged one, is left out when reading and cut off
when the next run appends. Recording is never a reason for a pass to fail: if the disk is full, it ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import ConfigError

FORMAT_VERSION: Final = 1

_MAGIC: Final = b"MOEROUTE"
_PREFIX: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<IIf")
_CHECKSUM: Final = struct.Struct("<I")
log = logging.getLogger(__name__)

ExpertIds = NDArray[np.integer]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the routers belong to."""

    identity: str  # of the checkpoint
    num_layers: int  # those with experts
    num_experts: int  # of a layer
    top_k: int
    slab_bytes: int = 0  # of one expert as it was served; 0: not known
    format_version: int = FORMAT_VERSION

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Of an expert's id in the file."""
        return np.dtype("<u1" if self.num_experts <= 256 else "<u2")

    def ids_bytes(self, num_tokens: int) -> int:
        """Bytes of a pass's ids."""
        return self.num_layers * num_tokens * self.top_k * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPass:
    """What the routers chose in one pass."""

    ids: ExpertIds  # [layers, tokens, K]
    num_generated: int  # tokens that came out of it
    compute_s: float  # it took, waiting for experts left out; 0: not known


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """A file, read."""

    header: TraceHeader
    passes: list[RoutedPass]
    dropped_bytes: int  # at the end, which were cut or damaged


class RoutingRecorder:
    """Appends a run's passes to a file. One thread uses it."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Open the file or begin it.

        Raises: ConfigError if it cannot be written to, is another process's, or belongs to another model.
        """
        self._path = path
        self._header = header
        self._layers: list[ExpertIds] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            remedy = "Choose another file for --record-routing"
            raise ConfigError(f"cannot write {path}: {error.strerror}. {remedy}") from error
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def add_layer(self, topk_ids: ExpertIds) -> None:
        """Record what the next layer's router chose: [tokens, K]."""
        self._layers.append(topk_ids.astype(self._header.dtype))

    def end_pass(self, *, num_generated: int, compute_s: float) -> None:
        """Write the pass down, if all of its layers have been recorded."""
        layers, self._layers = self._layers, []
        if self._descriptor < 0 or len(layers) != self._header.num_layers:
            return
        head = _RECORD.pack(len(layers[0]), num_generated, compute_s)
        body = head + b"".join(ids.tobytes() for ids in layers)
        record = body + _CHECKSUM.pack(zlib.crc32(body))
        try:
            if os.write(self._descriptor, record) < len(record):
                raise OSError("the disk took a part only")
        except OSError as error:
            log.warning("routing is recorded no longer: %s: %s", self._path, error)
            self.close()

    def drop_pass(self) -> None:
        """Forget a pass that did not come to its end."""
        self._layers = []

    def close(self) -> None:
        """Release the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is recording into {self._path}. Choose another file") from error
        content = self._path.read_bytes()
        own = _encode_header(self._header)
        if own.startswith(content):  # nothing, or as far as a run came that was killed at once
            os.pwrite(self._descriptor, own, 0)
            content = own
        header, start = _decode_header(content, self._path)
        if header != self._header:
            raise ConfigError(f"{self._path} has the routing of another model or format. Choose another file")
        end = max((end for _, end in _records(content, start, header)), default=start)
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)


def read_routing_trace(path: Path) -> RoutingTrace:
    """Read all whole records of a file. Raises: ConfigError if it cannot be read or is no trace of routing."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    header, start = _decode_header(content, path)
    passes = []
    whole_bytes = start
    for routed, end in _records(content, start, header):
        if routed.ids.size and routed.ids.max() >= header.num_experts:
            raise ConfigError(f"{path} names expert {routed.ids.max()}, where there are {header.num_experts}")
        passes.append(routed)
        whole_bytes = end
    return RoutingTrace(header, passes, len(content) - whole_bytes)


def _encode_header(header: TraceHeader) -> bytes:
    text = msgspec.json.encode(header)
    return _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def _decode_header(content: bytes, path: Path) -> tuple[TraceHeader, int]:
    """Return the description and where the records start."""
    if len(content) < _PREFIX.size or not content.startswith(_MAGIC):
        raise ConfigError(f"{path} is no trace of routing. Record one with --record-routing")
    _, length, expected = _PREFIX.unpack_from(content)
    end = _PREFIX.size + length
    text = content[_PREFIX.size : end]
    if zlib.crc32(text) != expected:
        raise ConfigError(f"{path} is damaged in its description. Record it again")
    try:
        header = msgspec.json.decode(text, type=TraceHeader)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is of a version that this moeflow does not know ({error})") from error
    if header.format_version != FORMAT_VERSION:
        raise ConfigError(f"{path} is of version {header.format_version}; this moeflow reads {FORMAT_VERSION}")
    if min(header.num_layers, header.num_experts, header.top_k) < 1:
        raise ConfigError(f"{path} describes a model without experts. Record it again")
    return header, end


def _records(content: bytes, start: int, header: TraceHeader) -> Iterator[tuple[RoutedPass, int]]:
    """Yield each whole record and where it ends."""
    while start + _RECORD.size <= len(content):
        num_tokens, num_generated, compute_s = _RECORD.unpack_from(content, start)
        ids_end = start + _RECORD.size + header.ids_bytes(num_tokens)
        end = ids_end + _CHECKSUM.size
        if end > len(content) or _CHECKSUM.pack(zlib.crc32(content[start:ids_end])) != content[ids_end:end]:
            return
        ids = np.frombuffer(content[start + _RECORD.size : ids_end], header.dtype)
        shape = (header.num_layers, num_tokens, header.top_k)
        yield RoutedPass(ids.reshape(shape), num_generated, compute_s), end
        start = end
