"""What the first rank and a process that wants to join say to each other before there is a group.

Joining: `JoinRequest` ->, <- `Invitation`, `Candidacy` ->, <- `Assignment`; either may say `Refusal` instead. Then
ranks connect to each other and load (`loading_signs.py`); then <- `PASS`, `PASS`, ...
"""

from __future__ import annotations

from typing import Annotated, Final, TypeVar

import msgspec

from moeflow.core.address import Address
from moeflow.core.engine_config import EngineConfig
from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp import conversation
from moeflow.parallel.tcp.conversation import ANSWER_S, Refusal
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.same_bits import own_processor, own_software

JOINING: Final = "joining"  # names of messages
PASS: Final = "pass"
MEETING_S: Final = 30.0  # for all ranks to connect


class JoinRequest(msgspec.Struct, frozen=True, tag="application"):
    """What wants to join."""

    software: str  # results differ in bits between versions
    processor: str
    cpu_isa: str  # the best instruction set it has, or may use
    num_threads: int
    available_bytes: int  # of memory


class Invitation(msgspec.Struct, frozen=True, tag="invitation"):
    """The model that is to be computed."""

    model_path: str  # on the first rank's machine


class Candidacy(msgspec.Struct, frozen=True, tag="candidacy"):
    """It is there."""

    fingerprint: str  # of the checkpoint
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]  # where other ranks can connect


class Assignment(msgspec.Struct, frozen=True, tag="assignment"):
    """All are there: begin."""

    rank: int
    config: EngineConfig  # the first rank's
    timeout_s: float  # of a collective
    group_id: bytes
    addresses: list[Address]  # by rank


Message = JoinRequest | Invitation | Candidacy | Assignment | Refusal
Expected = TypeVar("Expected", bound=Message)


def own_application(num_threads: int, cpu_isa: str, available_bytes: int) -> JoinRequest:
    """Return what this process is; it uses at most the instruction set `cpu_isa`."""
    return JoinRequest(own_software(), own_processor(), extension.best_isa(cpu_isa), num_threads, available_bytes)


def say(link: Link, message: Message) -> None:
    """Send a message."""
    conversation.say(link, JOINING, message)


def hear(link: Link, expected: type[Expected], timeout_s: float | None = ANSWER_S) -> Expected:
    """Return the next message. Blocks: until it is there. Raises: RefusedError; GroupError if it is another one."""
    return conversation.hear(link, JOINING, expected, Message, timeout_s)
