"""Messages between a head and a lender of memory for experts.

First link: the head sends `Borrowing`, and the lender answers `MemoryLoan`. Then the head sends or drops pieces of
experts, or reports that it is alive. The lender answers each message with `TAKEN`.

Second link: the head sends `Working`, and the lender answers `LenderReady`. Then work and results follow
(`expert_work.py`).

Either side may answer `Refusal` instead. A loan ends with either link, or after `SILENCE_S` without a message.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from moeflow.core.errors import GroupError
from moeflow.parallel.tcp.conversation import Refusal

LENDING: Final = "lending"  # names of messages
PIECE: Final = "piece of expert"  # followed by the expert's number and the piece's first byte
DROP: Final = "drop expert"  # followed by its number
HERE: Final = "here"  # with as many bytes as the head likes, which are thrown away
TAKEN: Final = "taken"
PIECE_BYTES: Final = 256 << 10  # of an expert at a time: others on the link wait no longer than for one
ANSWER_S: Final = 10.0  # for the answer to a message
SILENCE_S: Final = 10.0  # after which a head is taken to be gone; it says each second that it is there

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class Borrowing(msgspec.Struct, frozen=True, tag="borrowing"):
    """A head, its model's experts, and the number that should fit."""

    software: str
    processor: str
    cpu_isa: str  # that it computes with
    hidden: Count
    width: Count
    weight_format: str
    is_wide: bool  # as in `PackedWeight`
    num_layers: Count  # those with experts
    num_experts: Count  # of a layer
    num_wanted: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]  # 0: only to see whether it can be


class MemoryLoan(msgspec.Struct, frozen=True, tag="loan"):
    """Room for experts."""

    loan_id: bytes
    num_slots: int
    free_bytes: int  # that the lender has left


class Working(msgspec.Struct, frozen=True, tag="working"):
    """A second link of the head that has this loan."""

    loan_id: bytes


class LenderReady(msgspec.Struct, frozen=True, tag="ready"):
    """Work may come."""


Message = Borrowing | MemoryLoan | Working | LenderReady | Refusal


def piece_label(number: int, start: int) -> str:
    """Return the name of a message with a piece of an expert, which is numbered over all layers."""
    return f"{PIECE} {number} {start}"


def numbers_of(label: str, name: str, count: int) -> list[int]:
    """Return the numbers that follow a message's name. Raises: GroupError if they are not so many."""
    words = label.removeprefix(name).split()
    if len(words) != count or not all(word.isascii() and word.isdecimal() and len(word) < 16 for word in words):
        raise GroupError(f"a message is called {label!r}, where {count} numbers follow {name!r}")
    return [int(word) for word in words]
