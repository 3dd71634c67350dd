"""Which slot of the state memory belongs to whom, in models with recurrent layers.

A running request has a slot of its own, which each of its passes brings forward. A *checkpoint* is a slot with the
state behind a block of the prefix tree: a request with that prefix starts from it. Requests and newer checkpoints evict
the least recently used one, even if its block is in use, but never one that the current pass reads or writes. A slot
may also be *filled* by others than a pass, to be a checkpoint then.
Knows nothing of tensors, and of tokens only how many lie between two checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from moeflow.core.batch import NO_SLOT, StateUse
from moeflow.core.request import Request
from moeflow.kv.prefix_tree import Node


class StateCheckpoint(msgspec.Struct, eq=False):
    """The state behind a block. Once given up it is that no more, whatever its slot has later."""

    slot: int
    is_kept: bool = True  # whether the slot has the state: cleared before the slot is given to anyone else


class _RunningState(msgspec.Struct):
    """What a running request has."""

    slot: int = NO_SLOT  # its own
    source: Node | None = None  # whose checkpoint its first pass starts from
    saves: list[tuple[int, int]] = []  # of the pass that is planned: see `StateUse`


class StateSlots:
    """Gives slots to requests and to nodes of the prefix tree, takes them back."""

    def __init__(self, num_slots: int, checkpoint_every: int) -> None:
        """`checkpoint_every` is in tokens, a multiple of the block size."""
        assert num_slots > 1, "a request that starts from a checkpoint needs one beside it"
        self.num_slots = num_slots
        self.checkpoint_every = checkpoint_every
        self._free = list(range(num_slots - 1, -1, -1))
        self._held: dict[Request, _RunningState] = {}
        self._filled: set[int] = set()  # slots that others than a pass fill
        self._checkpoints: OrderedDict[Node, StateCheckpoint] = OrderedDict()  # longest unused first
        self._fresh: list[Node] = []  # whose checkpoints the pass under way writes

    @property
    def can_fill(self) -> bool:
        """Whether one more slot may be filled, so that one is left for requests that wait for none."""
        return len(self._filled) + 1 < self.num_slots

    @property
    def num_checkpoints(self) -> int:
        """Slots that hold the state of a prefix."""
        return len(self._checkpoints)

    def length(self, path: Sequence[Node]) -> int:
        """Return how long a path is up to its last node with a checkpoint."""
        return next((length for length in range(len(path), 0, -1) if path[length - 1] in self._checkpoints), 0)

    def of_path(self, path: Sequence[Node]) -> list[tuple[int, StateCheckpoint]]:
        """Return the checkpoints of a path, and how long it is up to each."""
        found = ((length, self._checkpoints.get(node)) for length, node in enumerate(path, 1))
        return [(length, checkpoint) for length, checkpoint in found if checkpoint is not None]

    def open(self, request: Request, path: list[Node]) -> None:
        """Have a request start behind a path that ends with a checkpoint; behind none, from nothing."""
        source = path[-1] if path else None
        if source is not None:
            self._checkpoints.move_to_end(source)
        self._held[request] = _RunningState(source=source)

    def hold(self, request: Request) -> bool:
        """Give a request its slot if it has none yet. Returns False, with nothing changed, if there is none."""
        held = self._held[request]
        if held.slot == NO_SLOT:
            held.slot = self._take()
        return held.slot != NO_SLOT

    def borders(self, start: int, stop: int) -> range:
        """Return the positions in (start, stop] behind which states are kept."""
        every = self.checkpoint_every
        return range((start // every + 1) * every, stop + 1, every)

    def save(self, request: Request, node: Node, position: int) -> None:
        """Have the pass that is planned keep the state behind a node, which ends at a position, if there is a slot."""
        if node in self._checkpoints:
            self._checkpoints.move_to_end(node)
            return
        slot = self._take()
        if slot != NO_SLOT:
            self._checkpoints[node] = StateCheckpoint(slot)
            self._fresh.append(node)
            self._held[request].saves.append((position, slot))

    def use(self, request: Request) -> StateUse:
        """Return what the pass that is planned does with a request's state."""
        held = self._held[request]
        source = held.slot if request.num_computed_tokens else NO_SLOT
        if held.source is not None:
            source = self._checkpoints[held.source].slot
        saves, held.saves = tuple(held.saves), []
        return StateUse(source, held.slot, saves)

    def close(self, request: Request) -> None:
        """Take back a request's slot."""
        held = self._held.pop(request)
        if held.slot != NO_SLOT:
            self._free.append(held.slot)

    def forget(self, node: Node) -> None:
        """Take back the checkpoint of a node that leaves the tree, if it has one."""
        if node in self._checkpoints:
            self._free.append(self._give_up(node))

    def begin_filling(self) -> int:
        """Return a slot that others than a pass fill; NO_SLOT: all are needed."""
        slot = self._take()
        if slot != NO_SLOT:
            self._filled.add(slot)
        return slot

    def end_filling(self, slot: int, node: Node | None) -> None:
        """Make such a slot the checkpoint of a node, if it has none yet; None: there is nothing in it."""
        self._filled.remove(slot)
        if node is None or node in self._checkpoints:
            self._free.append(slot)
        else:
            self._checkpoints[node] = StateCheckpoint(slot)

    def confirm_pass(self) -> None:
        """The pass succeeded: its kept states are valid, and its requests continue from their own slots."""
        self._fresh.clear()
        for held in self._held.values():
            held.source = None

    def discard_pass(self) -> None:
        """The pass failed: states it should have kept are void. Its requests must be closed already."""
        for node in self._fresh:
            self.forget(node)
        self._fresh.clear()

    def check_integrity(self) -> None:
        """Prove that every slot is in exactly one place. AssertionError if not."""
        own = [held.slot for held in self._held.values() if held.slot != NO_SLOT]
        kept = [checkpoint.slot for checkpoint in self._checkpoints.values()]
        everywhere = sorted([*self._free, *own, *self._filled, *kept])
        assert everywhere == list(range(self.num_slots)), "a state slot is lost or held twice"
        assert all(node.parent is not None for node in self._checkpoints), "a checkpoint outlived its block"

    def _take(self) -> int:
        """Return a free slot, or that of the checkpoint which can be missed most; NO_SLOT: all are needed."""
        if self._free:
            return self._free.pop()
        needed = {*self._fresh, *(held.source for held in self._held.values())}
        for node in self._checkpoints:
            if node not in needed:
                return self._give_up(node)
        return NO_SLOT

    def _give_up(self, node: Node) -> int:
        """Return the slot of a node's checkpoint, which is no more."""
        checkpoint = self._checkpoints.pop(node)
        checkpoint.is_kept = False
        return checkpoint.slot
