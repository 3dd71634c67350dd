"""Messages to an owner of experts, and its answers: rows of hidden states with their pairs, and weighted results.

    work      number, layer, rows n, experts of a row K, H | ids [n, K] int64 | weights [n, K] float32 | rows [n, H]
    result    number, status, seconds of waiting and of computing | pairs [P, H]

A row is sent once for all its experts there. If it has fewer than K of them, its ids are padded with an invalid number.
Results are those of the pairs that ask for an expert, row by row. Bytes are little-endian,
floats have 32 bits. Data from another process is checked before use.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.link import Message

WORK: Final = "work of experts"  # names of messages
RESULT: Final = "result of experts"
MAX_WORK_BYTES: Final = 64 << 20  # of one message; more rows go in several
_WORK_HEAD: Final = struct.Struct("<QIIII8x")
_RESULT_HEAD: Final = struct.Struct("<QIIdd")
_HEAD_BYTES: Final = 32  # of either: what follows is aligned


class Status(IntEnum):
    """How a piece of work ended."""

    DONE = 0
    ABSENT = 1  # an expert that it asks for is not there


@dataclass(frozen=True, slots=True)
class ExpertWork:
    """Rows of one layer, and what experts are to compute with them."""

    layer: int  # counts those with experts
    hidden: Tensor  # [n, H] float32
    expert_ids: Tensor  # [n, K] int64; the number of experts: none
    weights: Tensor  # [n, K] float32


@dataclass(frozen=True, slots=True)
class WorkResult:
    """What became of it."""

    status: Status
    pairs: Tensor  # [P, H] float32: weighted results, of each row in the order of its ids
    waited_s: float  # until it was begun
    computed_s: float


@dataclass(frozen=True, slots=True)
class Selection:
    """Those pairs (token, k) of a layer that some of its experts compute."""

    rows: Tensor  # [n] int64, the tokens
    expert_ids: Tensor  # [n, K] int64, other experts' replaced by the filler
    weights: Tensor  # [n, K] float32
    pairs: Tensor  # [P] int64, token * K + k

    @classmethod
    def of(cls, topk_ids: Tensor, topk_weights: Tensor, is_wanted: Tensor) -> Selection:
        """Select the pairs of wanted experts; the filler is their number.

        Shapes: topk_ids [T, K] int64, topk_weights [T, K] float32, is_wanted [E] bool.
        """
        wanted = is_wanted[topk_ids]
        rows = wanted.any(dim=1).nonzero().view(-1)
        ids = topk_ids.masked_fill(~wanted, len(is_wanted))[rows]
        return cls(rows, ids, topk_weights[rows], wanted.view(-1).nonzero().view(-1))

    def in_messages(self, num_rows: int) -> list[Selection]:
        """Return these pairs in parts of at most so many rows."""
        if len(self.rows) <= num_rows:
            return [self]
        num_fillers = self.expert_ids.numel() - len(self.pairs)
        filler = self.expert_ids.max() if num_fillers else -1
        of_row = (self.expert_ids != filler).sum(dim=1)
        cuts = [int(part.sum()) for part in torch.split(of_row, num_rows)]
        parts = (torch.split(it, num_rows) for it in (self.rows, self.expert_ids, self.weights))
        return [Selection(*part) for part in zip(*parts, torch.split(self.pairs, cuts), strict=True)]

    def work(self, layer: int, hidden: Tensor) -> ExpertWork:
        """Return the work; hidden [T, H]."""
        return ExpertWork(layer, hidden[self.rows], self.expert_ids, self.weights)


def max_rows(hidden: int, top_k: int) -> int:
    """Return how many rows one message may have at most; their results do not take more, either."""
    return max((MAX_WORK_BYTES - _HEAD_BYTES) // (4 * hidden * top_k + 12 * top_k), 1)


def work_bytes(num_rows: int, top_k: int, hidden: int) -> int:
    """Return the bytes of a message of work."""
    return _HEAD_BYTES + num_rows * (top_k * 12 + hidden * 4)


def result_bytes(num_pairs: int, hidden: int) -> int:
    """Return the bytes of a message of results."""
    return _HEAD_BYTES + num_pairs * hidden * 4


def tensor_of(message: Message) -> Tensor:
    """Return a message's payload. Shapes: [bytes] uint8."""
    payload = torch.empty(message.num_bytes, dtype=torch.uint8)
    message.copy_to(payload.numpy().data)
    return payload


def encode_work(number: int, work: ExpertWork) -> memoryview:
    """Return the message of a piece of work, which the sender numbers."""
    num_rows, top_k = work.expert_ids.shape
    message = torch.empty(work_bytes(num_rows, top_k, work.hidden.shape[1]), dtype=torch.uint8)
    head = _WORK_HEAD.pack(number, work.layer, num_rows, top_k, work.hidden.shape[1])
    message[:_HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    ids, weights, rows = _work_parts(message, num_rows, top_k, work.hidden.shape[1])
    ids.copy_(work.expert_ids)
    weights.copy_(work.weights)
    rows.copy_(work.hidden)
    return message.numpy().data


def decode_work(message: Tensor, *, num_layers: int, num_experts: int, hidden: int) -> tuple[int, ExpertWork]:
    """Return number and work of a message [bytes] uint8, whose memory it shares.

    Raises: GroupError if it does not fit these experts.
    """
    if len(message) < _HEAD_BYTES:
        raise GroupError(f"{WORK} of {len(message)} bytes has no head")
    number, layer, num_rows, top_k, width = _WORK_HEAD.unpack(message[:_HEAD_BYTES].numpy().tobytes())
    if width != hidden or layer >= num_layers or not (num_rows and 1 <= top_k <= num_experts):
        raise GroupError(
            f"{WORK} asks for {top_k} of {num_experts} experts of layer {layer} of {num_layers}, with {num_rows} rows "
            f"of {width} values where {hidden} are expected"
        )
    if len(message) != work_bytes(num_rows, top_k, hidden) or num_rows > max_rows(hidden, top_k):
        raise GroupError(f"{WORK} of {num_rows} rows has {len(message)} bytes")
    ids, weights, rows = _work_parts(message, num_rows, top_k, hidden)
    if int(ids.min()) < 0 or int(ids.max()) > num_experts:
        raise GroupError(f"{WORK} asks for an expert that does not exist")
    return number, ExpertWork(layer, rows, ids, weights)


def encode_result(number: int, result: WorkResult) -> memoryview:
    """Return the message of a result."""
    head = _RESULT_HEAD.pack(number, result.status, 0, result.waited_s, result.computed_s)
    message = torch.empty(_HEAD_BYTES + result.pairs.numel() * 4, dtype=torch.uint8)
    message[:_HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    message[_HEAD_BYTES:].view(torch.float32).copy_(result.pairs.view(-1))
    return message.numpy().data


def decode_result(message: Tensor, hidden: int) -> tuple[int, WorkResult]:
    """Return number and result of a message, whose memory it shares. Raises: GroupError if it is none."""
    if len(message) < _HEAD_BYTES or (len(message) - _HEAD_BYTES) % (4 * hidden):
        raise GroupError(f"{RESULT} of {len(message)} bytes is not made of rows of {hidden} values")
    number, status, _, waited_s, computed_s = _RESULT_HEAD.unpack(message[:_HEAD_BYTES].numpy().tobytes())
    if status not in tuple(Status):
        raise GroupError(f"{RESULT} has the unknown status {status}")
    pairs = message[_HEAD_BYTES:].view(torch.float32).view(-1, hidden)
    return number, WorkResult(Status(status), pairs, waited_s, computed_s)


def _work_parts(message: Tensor, num_rows: int, top_k: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a message as tensors: ids, weights, rows."""
    weights_start = _HEAD_BYTES + num_rows * top_k * 8
    rows_start = weights_start + num_rows * top_k * 4
    ids = message[_HEAD_BYTES:weights_start].view(torch.int64).view(num_rows, top_k)
    weights = message[weights_start:rows_start].view(torch.float32).view(num_rows, top_k)
    return ids, weights, message[rows_start:].view(torch.float32).view(num_rows, hidden)
