"""The head's side of a loan: one link sends experts to a lender, and one sends work for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Final

from moeflow.checkpoint.packed.layout import SlabSpec
from moeflow.core.address import format_address
from moeflow.core.errors import ConfigError, GroupError
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.on_demand import on_demand
from moeflow.parallel.remote.lending import (
    ANSWER_S,
    DROP,
    HERE,
    LENDING,
    PIECE_BYTES,
    TAKEN,
    Borrowing,
    LenderReady,
    MemoryLoan,
    Message,
    Working,
    piece_label,
)
from moeflow.parallel.tcp.conversation import hear, say
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.same_bits import own_processor, own_software

with on_demand(__name__):
    from moeflow.parallel.remote import work_client
    from moeflow.parallel.tcp import endpoint

REACTION_S: Final = 3.0  # longest answer time of a lender without computation
_NUM_PROBES: Final = 5
_PROBE_BYTES: Final = 4 << 20
_PROBE_S: Final = 0.5  # about, for the whole measurement


def borrowing_of(
    spec: SlabSpec, shape: ModelConfig, *, cpu_isa: str, is_wide: bool, num_wanted: int | None = None
) -> Borrowing:
    """Return the request to a lender: slots for `num_wanted` experts; None: for all.

    Raises: ConfigError if lenders cannot compute this kind of experts.
    """
    if (
        shape.feed_forward.expert_bias
        or shape.feed_forward.swiglu_limit is not None
        or not shape.feed_forward.is_gated
        or shape.feed_forward.hidden_act != "silu"
    ):
        raise ConfigError(
            "Lenders (--remote-experts) compute SwiGLU experts without biases, and the experts of a "
            f"{shape.model_type} model are not: remove --remote-experts"
        )
    return Borrowing(
        software=own_software(),
        processor=own_processor(),
        cpu_isa=cpu_isa,
        hidden=shape.hidden_size,
        width=shape.feed_forward.intermediate_size,
        weight_format=spec.weight_format,
        is_wide=is_wide,
        num_layers=spec.num_layers,
        num_experts=spec.num_experts,
        num_wanted=spec.num_slabs if num_wanted is None else num_wanted,
    )


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The speed of an idle link."""

    round_trip_s: float
    bytes_per_s: float


class Borrowed:
    """A loan. One thread uses it, except for `client`."""

    def __init__(self, address: tuple[str, int], token: bytes, borrowing: Borrowing) -> None:
        """Connect and borrow. Blocks: some seconds at most.

        Raises: GroupError without an answer; RefusedError with the lender's reason; ConfigError for a wrong token.
        """
        self.where = format_address(*address)
        with ExitStack() as undo:
            self._undo = undo
            self._address, self._token, self._borrowing = address, token, borrowing
            self._link = self._connect()
            say(self._link, LENDING, borrowing)
            loan = hear(self._link, LENDING, MemoryLoan, Message, ANSWER_S)
            self._loan_id, self.num_slots, self.free_bytes = loan.loan_id, loan.num_slots, loan.free_bytes
            if loan.num_slots > borrowing.num_wanted:
                raise GroupError(f"{self.where} lends {loan.num_slots} slots where {borrowing.num_wanted} are wanted")
            self._undo = undo.pop_all()

    def client(self, on_end: Callable[[GroupError], None]) -> work_client.WorkClient:
        """Return a client that sends work to the lender, over a link of its own. Raises: as `Borrowed`."""
        link = self._connect()
        say(link, LENDING, Working(self._loan_id))
        hear(link, LENDING, LenderReady, Message, ANSWER_S)
        return work_client.WorkClient(link, self._borrowing.hidden, self._borrowing.num_experts, on_end)

    def measure(self) -> LinkRates:
        """Measure the link. Blocks: for half a second or slightly longer. Raises: GroupError."""
        trips = [self.say_here() for _ in range(_NUM_PROBES)]
        num_bytes, best, start_s = 64 << 10, 0.0, time.perf_counter()
        while time.perf_counter() - start_s < _PROBE_S:
            seconds = max(self.say_here(num_bytes) - min(trips), 1e-6)
            best = max(best, num_bytes / seconds)
            num_bytes = min(2 * num_bytes, _PROBE_BYTES)
        return LinkRates(min(trips), best)

    def say_here(self, num_bytes: int = 0) -> float:
        """Send a sign of life of `num_bytes`; return the seconds until the answer. Raises: GroupError."""
        start_s = time.perf_counter()
        self._say(HERE, memoryview(bytes(num_bytes)))
        return time.perf_counter() - start_s

    def send_expert(self, number: int, content: memoryview, pause: Callable[[float], None]) -> None:
        """Send an expert in pieces; call `pause` after each, with its seconds. Raises: GroupError."""
        for start in range(0, len(content), PIECE_BYTES):
            begin_s = time.perf_counter()
            self._say(piece_label(number, start), content[start : start + PIECE_BYTES])
            pause(time.perf_counter() - begin_s)

    def drop(self, number: int) -> None:
        """Have the lender forget an expert. Raises: GroupError."""
        self._say(f"{DROP} {number}", memoryview(b""))

    def close(self) -> None:
        """Give the loan back."""
        self._link.say_farewell("the head has ended")
        self._undo.close()

    def _connect(self) -> Link:
        link = endpoint.connect(*self._address, self._token)
        self._undo.callback(link.endpoint.close)
        return link

    def _say(self, label: str, payload: memoryview) -> None:
        self._link.send_message(label, payload)
        self._link.receive_message(TAKEN, REACTION_S)


def probe_lender(address: tuple[str, int], token: bytes, borrowing: Borrowing) -> tuple[int, LinkRates]:
    """Return a lender's free bytes and the speed of the link, without a loan.

    Raises: as `Borrowed`.
    """
    with closing(Borrowed(address, token, borrowing)) as borrowed:
        return borrowed.free_bytes, borrowed.measure()
