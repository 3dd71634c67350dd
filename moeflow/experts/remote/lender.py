"""Lends this machine's memory to heads: keeps their experts, and computes with them.

It needs no checkpoint. A loan is bound to its links: when the head ends, dies or falls silent, its memory becomes free.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from moeflow.core.errors import CapacityError, ConfigError, GroupError
from moeflow.core.units import format_bytes
from moeflow.experts.remote import loan as loans
from moeflow.experts.slot_arena import arena_bytes, num_slots_in
from moeflow.kernels.cpu import extension
from moeflow.parallel.remote.expert_service import ExpertService, ServedClient
from moeflow.parallel.remote.lending import (
    ANSWER_S,
    DROP,
    HERE,
    LENDING,
    PIECE,
    PIECE_BYTES,
    SILENCE_S,
    TAKEN,
    Borrowing,
    LenderReady,
    MemoryLoan,
    Message,
    Working,
    numbers_of,
)
from moeflow.parallel.tcp.conversation import Refusal, hear, say
from moeflow.parallel.tcp.link import Kind, Link
from moeflow.parallel.tcp.same_bits import own_processor, own_software, why_bits_differ

logger = logging.getLogger(__name__)

OnNews = Callable[[str], None]
_MAX_HERE_BYTES = 16 << 20


@dataclass(eq=False)
class _Head:
    """A head with a loan, and its links."""

    link: Link
    loan: loans.SlotLoan
    clients: list[ServedClient] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Own:
    """The software, processor and instruction set of this machine."""

    software: str
    processor: str
    cpu_isa: str


class Lender:
    """The memory, its loans, and the service that computes for all heads."""

    def __init__(self, memory_bytes: int, *, num_threads: int, cpu_isa: str, on_news: OnNews) -> None:
        """Lend at most `memory_bytes`. `cpu_isa` is the highest instruction set to use; empty: the best available."""
        self._memory_bytes = memory_bytes
        self._own = _Own(own_software(), own_processor(), extension.best_isa(cpu_isa))
        self._on_news = on_news
        self._lock = threading.Lock()
        self._heads: dict[bytes, _Head] = {}
        self._service = ExpertService(num_threads)
        self._is_closed = False

    @property
    def free_bytes(self) -> int:
        """The memory without a loan."""
        return self._memory_bytes - sum(head.loan.num_bytes for head in self._heads.values())

    def take_in(self, link: Link) -> None:
        """Serve a link of an `Endpoint`. Blocks: until the link ends, unless it is for work."""
        try:
            self._serve(link)
        except GroupError as error:
            self._refuse(link, str(error))
        except Exception as error:  # a bug: it ends this link, not the others
            logger.exception("the link to %s failed", link.address)
            self._refuse(link, f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """End all loans, and notify the heads. Blocks: until running computations end."""
        with self._lock:
            self._is_closed = True
            heads = list(self._heads.values())
        for head in heads:
            head.link.say_farewell("the lender has ended")
        self._service.close()

    def _serve(self, link: Link) -> None:
        """Perform the requests of a link. Raises: GroupError."""
        match hear(link, LENDING, msgspec.Struct, Message, ANSWER_S):
            case Borrowing() as borrowing:
                try:
                    self._check(borrowing)
                    if borrowing.num_wanted:
                        self._lend(link, borrowing)
                    else:
                        self._show(link)
                except (ConfigError, CapacityError) as error:
                    say(link, LENDING, Refusal(str(error), may_retry=isinstance(error, CapacityError)))
                    raise GroupError(f"nothing is lent: {error}") from None
            case Working() as working:
                self._take_work(link, working)
            case other:
                raise GroupError(f"{link.peer} says {type(other).__name__} where Borrowing is expected")

    def _refuse(self, link: Link, reason: str) -> None:
        self._on_news(f"{link.address}: {reason}")
        link.say_farewell(reason)

    def _check(self, borrowing: Borrowing) -> None:
        """Raises: ConfigError if a head's own results would have other bits."""
        if reason := why_bits_differ(self._own, borrowing, "the head"):
            raise ConfigError(f"this lender computes otherwise: {reason}")

    def _show(self, link: Link) -> None:
        """Report the free memory to a head, and answer its probes of the link, until it leaves."""
        say(link, LENDING, MemoryLoan(b"", 0, self.free_bytes))
        with suppress(GroupError):
            _obey(link, None)
        link.close()

    def _lend(self, link: Link, borrowing: Borrowing) -> None:
        """Make a loan and serve its link until it ends. Raises: CapacityError if no memory is free."""
        loan_id, reason = secrets.token_bytes(16), ""
        head = self._grant(link, borrowing, loan_id)
        try:
            say(link, LENDING, MemoryLoan(loan_id, head.loan.num_slots, self.free_bytes))
            self._say_lent(head)
            _obey(link, head.loan)
        except GroupError as error:
            reason = str(error)
        finally:
            self._end(loan_id, head, reason)

    def _grant(self, link: Link, borrowing: Borrowing, loan_id: bytes) -> _Head:
        """Return a head with a loan. Raises: CapacityError if no memory is free."""
        slab_bytes = loans.borrowed_bytes(borrowing)
        with self._lock:
            if self._is_closed:
                raise CapacityError("the lender has ended")
            num_slots = min(num_slots_in(self.free_bytes, slab_bytes), borrowing.num_wanted)
            if not num_slots:
                need, free = format_bytes(arena_bytes(1, slab_bytes)), format_bytes(self.free_bytes)
                raise CapacityError(
                    f"{free} of {format_bytes(self._memory_bytes)} are not lent yet, and one expert takes {need}: lend "
                    "more (--memory), or end another head"
                )
            head = self._heads[loan_id] = _Head(link, loans.SlotLoan(borrowing, num_slots))
            return head

    def _take_work(self, link: Link, working: Working) -> None:
        """Compute a head's work. Raises: GroupError if it has no loan."""
        with self._lock:
            head = self._heads.get(working.loan_id)
            if head is None:
                raise GroupError("work is announced for a loan that does not exist, or has ended")
            say(link, LENDING, LenderReady())
            head.clients.append(
                self._service.serve(link, head.loan, lambda _: head.link.say_farewell("work has ended"))
            )

    def _end(self, loan_id: bytes, head: _Head, reason: str) -> None:
        """End a loan."""
        with self._lock:
            del self._heads[loan_id]
        for client in head.clients:
            client.close("the loan has ended")
        num_held = head.loan.num_held
        head.loan.give_back()
        head.link.close()
        free = format_bytes(self.free_bytes)
        self._on_news(f"{head.link.address} has gone, with {num_held} experts; {free} are free ({reason})")

    def _say_lent(self, head: _Head) -> None:
        lent, free = format_bytes(head.loan.num_bytes), format_bytes(self.free_bytes)
        self._on_news(f"{head.link.address} borrows {lent} for {head.loan.num_slots} experts; {free} are free")


def _obey(link: Link, loan: loans.SlotLoan | None) -> None:
    """Perform a head's messages about its experts, without end; loan None: it has no experts, only signs of life.

    Raises: GroupError when the link ends, or is silent too long.
    """
    while True:
        message = link.next("that it is there", SILENCE_S)
        label, num_bytes = message.label, message.num_bytes
        if message.kind == Kind.MESSAGE and label == HERE and num_bytes <= _MAX_HERE_BYTES:
            pass
        elif loan is None or message.kind != Kind.MESSAGE:
            raise GroupError(f"{label!r} of {num_bytes} bytes is not expected")
        elif label.startswith(PIECE) and 0 < num_bytes <= PIECE_BYTES:
            number, start = numbers_of(label, PIECE, 2)
            message.copy_to(loan.piece(number, start, num_bytes))
            if start + num_bytes == loan.expert_bytes:
                loan.complete(number)
        elif label.startswith(DROP) and not num_bytes:
            (number,) = numbers_of(label, DROP, 1)
            loan.drop(number)
        else:
            raise GroupError(f"{label!r} of {num_bytes} bytes is not expected")
        link.send_message(TAKEN, b"")
