"""What the first rank and a process that wants to join say to each other before there is a group.

Joining: `Application` ->, <- `Invitation`, `Candidacy` ->, <- `Assignment`; either may say `Refusal` instead. Then
ranks connect to each other and load; `LOADED` ->, <- `PASS`, `PASS`, ...
"""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Final, TypeVar

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import GroupError
from moeflow.kernels.cpu import extension
from moeflow.parallel.tcp.mesh import Address
from moeflow.parallel.tcp.tcp_link import TcpLink

JOINING: Final = "joining"  # names of messages
LOADED: Final = "loaded"
PASS: Final = "pass"
ANSWER_S: Final = 60.0  # in which the other end answers: a checkpoint may have to be opened
MEETING_S: Final = 30.0  # in which all ranks have found each other


class Application(msgspec.Struct, frozen=True, tag="application"):
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


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    """Why it comes to nothing."""

    reason: str
    may_retry: bool = False  # it may be otherwise later


Message = Application | Invitation | Candidacy | Assignment | Refusal
Expected = TypeVar("Expected", bound=Message)


class RefusedError(GroupError):
    """The other end has refused."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.reason)
        self.may_retry = refusal.may_retry


def own_application(num_threads: int, cpu_isa: str, available_bytes: int) -> Application:
    """Return what this process is; it uses at most the instruction set `cpu_isa`."""
    versions = (f"{name} {importlib.metadata.version(name)}" for name in ("moeflow", "torch"))
    return Application(
        " with ".join(versions), platform.machine(), extension.best_isa(cpu_isa), num_threads, available_bytes
    )


def say(link: TcpLink, message: Message) -> None:
    """Send a message. Raises: GroupError."""
    link.send_message(JOINING, msgspec.msgpack.encode(message), ANSWER_S)


def hear(link: TcpLink, expected: type[Expected], timeout_s: float | None = ANSWER_S) -> Expected:
    """Return the next message. Blocks: until it is there. Raises: RefusedError; GroupError if it is another one."""
    data = link.receive_message(JOINING, timeout_s)
    try:
        message: Message = msgspec.msgpack.decode(data, type=Message)
    except msgspec.DecodeError as error:
        raise GroupError(f"{link.peer} says what this version does not understand: {error}") from None
    if isinstance(message, Refusal):
        raise RefusedError(message)
    if not isinstance(message, expected):
        raise GroupError(f"{link.peer} says {type(message).__name__} where {expected.__name__} is expected")
    return message
