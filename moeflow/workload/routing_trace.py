"""Which experts every token of a run used, layer by layer: a file that grows while a model serves.

    8 bytes magic | length and CRC-32 of the description (4 bytes each) | description (JSON)
    then a record for each pass:
    tokens (u32) | texts (u32) | tokens generated (u32) | routers ahead A (u32) | seconds of computing (f32)
    | of each text: number, known from, start, stop, rows (u32 each) | each text's tokens from there to `stop` (u32)
    | expert ids [layers, tokens, K] | ids by routers ahead [layers, A, tokens, K] | CRC-32 (u32)

Ids take a byte each for up to 256 experts, two for more; in the order of the router's choice. A record has a text's
tokens up to the end of the pass, so that predictors that use text can run again. Routers ahead are those of the
A layers that follow, asked about what this layer's experts got; behind the last layer they are 0.
A record that was cut by a crash, or anything after a damaged one, is left out. `routing_recorder.py` writes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.errors import ConfigError

FORMAT_VERSION: Final = 2

_MAGIC: Final = b"MOEROUTE"
_PREFIX: Final = struct.Struct("<8sII")
_RECORD: Final = struct.Struct("<IIIIf")
_TEXT_FIELDS: Final = 5
_WORD: Final = np.dtype("<u4")
_CHECKSUM: Final = struct.Struct("<I")

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


@dataclass(frozen=True, slots=True)
class TextShare:
    """A text's share of a pass: its tokens from position `start` to `stop`, and behind them drafted ones."""

    number: int  # of the text, within a run
    known_from: int  # position of the first of `token_ids`; 0: the text is new, or begins again
    start: int
    stop: int
    num_rows: int  # tokens that were computed, drafted ones included
    token_ids: Sequence[int]  # up to `stop`; what came before stands in earlier passes


@dataclass(frozen=True, slots=True, eq=False)
class RoutedPass:
    """What the routers chose in one pass."""

    ids: ExpertIds  # [layers, tokens, K]
    num_generated: int  # tokens that came out of it
    compute_s: float  # it took, waiting for experts left out; 0: not known
    texts: Sequence[TextShare] = ()  # in the order of their rows; none: not known
    ahead: ExpertIds | None = None  # [layers, A, tokens, K]; None: no router was asked


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """A file, read."""

    header: TraceHeader
    passes: list[RoutedPass]
    dropped_bytes: int  # at the end, which were cut or damaged


def read_routing_trace(path: Path) -> RoutingTrace:
    """Read all whole records of a file. Raises: ConfigError if it cannot be read or is no trace of routing."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    header, start = decode_header(content, path)
    passes = []
    whole_bytes = start
    for routed, end in whole_records(content, start, header):
        highest = max((int(ids.max()) for ids in (routed.ids, routed.ahead) if ids is not None and ids.size), default=0)
        if highest >= header.num_experts:
            raise ConfigError(f"{path} names expert {highest}, where there are {header.num_experts}")
        passes.append(routed)
        whole_bytes = end
    return RoutingTrace(header, passes, len(content) - whole_bytes)


def encode_pass(
    layers: Sequence[tuple[ExpertIds, ExpertIds]],
    texts: Sequence[TextShare],
    *,
    num_generated: int,
    compute_s: float,
) -> bytes:
    """Return a record. Shapes: of each layer what its router chose, [tokens, K], and routers ahead, [A, tokens, K]."""
    num_tokens, num_ahead = len(layers[0][0]), len(layers[0][1])
    fields = [(text.number, text.known_from, text.start, text.stop, text.num_rows) for text in texts]
    body = b"".join(
        [
            _RECORD.pack(num_tokens, len(texts), num_generated, num_ahead, compute_s),
            *(np.array(words, _WORD).tobytes() for words in (*fields, *(text.token_ids for text in texts))),
            *(ids.tobytes() for ids, _ in layers),
            *(ahead.tobytes() for _, ahead in layers),
        ]
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


def encode_header(header: TraceHeader) -> bytes:
    """Return how a file begins."""
    text = msgspec.json.encode(header)
    return _PREFIX.pack(_MAGIC, len(text), zlib.crc32(text)) + text


def decode_header(content: bytes, path: Path) -> tuple[TraceHeader, int]:
    """Return the description and where the records start. Raises: ConfigError if it is no trace of routing."""
    if len(content) < _PREFIX.size or not content.startswith(_MAGIC):
        raise ConfigError(f"{path} is no trace of routing. Record one with --record-routing")
    _, length, expected = _PREFIX.unpack_from(content)
    end = _PREFIX.size + length
    text = content[_PREFIX.size : end]
    if zlib.crc32(text) != expected:
        raise ConfigError(f"{path} is damaged in its description. Record it again")
    try:
        header = msgspec.json.decode(text, type=TraceHeader)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"{path} is of a version that this moeflow does not know ({error})") from error
    if header.format_version != FORMAT_VERSION:
        raise ConfigError(f"{path} is of version {header.format_version}; this moeflow reads {FORMAT_VERSION}")
    if min(header.num_layers, header.num_experts, header.top_k) < 1:
        raise ConfigError(f"{path} describes a model without experts. Record it again")
    return header, end


def whole_records(content: bytes, start: int, header: TraceHeader) -> Iterator[tuple[RoutedPass, int]]:
    """Yield each whole record and where it ends."""
    while start + _RECORD.size <= len(content):
        num_tokens, num_texts, num_generated, num_ahead, compute_s = _RECORD.unpack_from(content, start)
        fields_at = start + _RECORD.size
        tokens_at = fields_at + num_texts * _TEXT_FIELDS * _WORD.itemsize
        if tokens_at > len(content):
            return
        fields = np.frombuffer(content[fields_at:tokens_at], _WORD).reshape(num_texts, _TEXT_FIELDS).tolist()
        num_known = [stop - known_from for _, known_from, _, stop, _ in fields]
        ids_at = tokens_at + sum(num_known) * _WORD.itemsize
        ahead_at = ids_at + header.ids_bytes(num_tokens)
        checksum_at = ahead_at + num_ahead * header.ids_bytes(num_tokens)
        end = checksum_at + _CHECKSUM.size
        if min(num_known, default=0) < 0 or end > len(content):
            return
        if _CHECKSUM.pack(zlib.crc32(content[start:checksum_at])) != content[checksum_at:end]:
            return
        words = iter(np.frombuffer(content[tokens_at:ids_at], _WORD).tolist())
        yield (
            RoutedPass(
                ids=_ids(content[ids_at:ahead_at], header, num_tokens),
                num_generated=num_generated,
                compute_s=compute_s,
                texts=[_text(of_text, words) for of_text in fields],
                ahead=_ids(content[ahead_at:checksum_at], header, num_ahead, num_tokens) if num_ahead else None,
            ),
            end,
        )
        start = end


def _text(fields: Sequence[int], words: Iterator[int]) -> TextShare:
    number, known_from, start, stop, num_rows = fields
    return TextShare(number, known_from, start, stop, num_rows, list(islice(words, stop - known_from)))


def _ids(content: bytes, header: TraceHeader, *shape: int) -> ExpertIds:
    return np.frombuffer(content, header.dtype).reshape(header.num_layers, *shape, header.top_k)
