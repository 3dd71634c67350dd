"""The memory of one head's loan: its experts, as they arrive and are dropped, ready for computation."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from moeflow.core.errors import ConfigError, GroupError
from moeflow.experts.slot_arena import SlotArena
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.packed_experts import PackedExperts, expert_bytes
from moeflow.kernels.weight_format import FORMATS, WeightFormat
from moeflow.parallel.remote.lending import Borrowing


def borrowed_bytes(borrowing: Borrowing) -> int:
    """Return the bytes of one expert. Raises: ConfigError if the weight format is unknown."""
    return expert_bytes(borrowing.hidden, borrowing.width, _weight_format(borrowing))


def _weight_format(borrowing: Borrowing) -> WeightFormat:
    if borrowing.weight_format not in FORMATS:
        raise ConfigError(f"weight format {borrowing.weight_format!r} is unknown")
    return cast(WeightFormat, borrowing.weight_format)


class SlotLoan:
    """Slots, and the slot of each expert; an `ExpertOwner`."""

    def __init__(self, borrowing: Borrowing, num_slots: int) -> None:
        """Reserve the memory, which arriving experts allocate. Raises: CapacityError, ConfigError."""
        self.hidden, self.num_layers, self.num_experts = borrowing.hidden, borrowing.num_layers, borrowing.num_experts
        self.expert_bytes = borrowed_bytes(borrowing)
        self.num_slots = num_slots
        self._cpu_isa = borrowing.cpu_isa
        self._arena = SlotArena(num_slots, self.expert_bytes)
        self._experts = PackedExperts(
            num_slots,
            borrowing.hidden,
            borrowing.width,
            _weight_format(borrowing),
            is_wide=borrowing.is_wide,
            storage=self._arena.slots,
        )
        self._lock = threading.Lock()  # of all below; held during computation
        self._slots: list[dict[int, int]] = [{} for _ in range(self.num_layers)]  # by expert
        self._free = list(range(num_slots))
        self._incoming: tuple[int, int] | None = None  # number and slot of the arriving expert

    @property
    def num_bytes(self) -> int:
        """The most memory that it takes."""
        return self._arena.num_bytes

    @property
    def num_held(self) -> int:
        """How many experts it holds."""
        return sum(map(len, self._slots))

    @contextmanager
    def held(self, layer: int) -> Iterator[tuple[PackedExperts, Mapping[int, int]]]:
        """See `ExpertOwner`."""
        with self._lock:
            extension.use_isa(self._cpu_isa)
            yield self._experts, self._slots[layer]

    def piece(self, number: int, start: int, num_bytes: int) -> memoryview:
        """Return the memory for a piece. Raises: GroupError if it is not the next piece, or no slot is free."""
        with self._lock:
            if start == 0:
                self._begin(number)
            if self._incoming is None or self._incoming[0] != number or start + num_bytes > self.expert_bytes:
                raise GroupError(f"{num_bytes} bytes from {start} on of expert {number} are not the next piece")
            return self._arena.view(self._incoming[1])[start : start + num_bytes]

    def complete(self, number: int) -> None:
        """Add an expert whose last piece has arrived."""
        with self._lock:
            assert self._incoming is not None
            layer, expert = divmod(number, self.num_experts)
            self._slots[layer][expert] = self._incoming[1]
            self._incoming = None

    def drop(self, number: int) -> None:
        """Forget an expert. Blocks: during computations. Raises: GroupError if it is absent."""
        layer, expert = self._place(number)
        with self._lock:
            if expert not in self._slots[layer]:
                raise GroupError(f"expert {expert} of layer {layer} is to be dropped, and is not there")
            self._free.append(self._slots[layer].pop(expert))

    def give_back(self) -> None:
        """Forget all experts and return their memory to the system. Blocks: during computations."""
        with self._lock:
            self._slots = [{} for _ in range(self.num_layers)]
            self._free, self._incoming = [], None
            self._arena.give_back(0)

    def _begin(self, number: int) -> None:
        layer, expert = self._place(number)
        if expert in self._slots[layer]:
            raise GroupError(f"expert {expert} of layer {layer} comes, and is there already")
        if self._incoming is not None:  # the head has abandoned it
            self._free.append(self._incoming[1])
            self._incoming = None
        if not self._free:
            raise GroupError(f"expert {expert} of layer {layer} comes, and all {self.num_slots} slots are taken")
        self._incoming = number, self._free.pop()

    def _place(self, number: int) -> tuple[int, int]:
        layer, expert = divmod(number, self.num_experts)
        if not 0 <= layer < self.num_layers:
            raise GroupError(f"there is no expert {number} in {self.num_layers} layers of {self.num_experts}")
        return layer, expert
