"""Experts in lenders' memory: chooses the experts of a layer that lenders compute, and collects the results.

Rows are sent before this process computes, and results are collected afterwards. This process computes undelivered
results itself, from disk. Pairs have the same bits on every machine, and are added up here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moeflow.core.errors import GroupError
from moeflow.core.trial import Trial
from moeflow.experts.cache.expert_cache import ExpertCache
from moeflow.experts.remote.borrowing import REACTION_S
from moeflow.experts.remote.lender_costs import Candidate, ExpertSize, Split
from moeflow.experts.remote.remote_lender import Address, RemoteLender
from moeflow.experts.remote.worth import LendingMove, hot_enough, next_move
from moeflow.parallel.remote.expert_work import Selection, Status, max_rows, result_bytes, work_bytes
from moeflow.parallel.remote.lending import Borrowing
from moeflow.parallel.remote.work_client import PendingWork

_MAX_ROWS: Final = 512  # of a message: the lender computes one while the next arrives
_MAX_MESSAGES: Final = 12  # of a layer to one lender
_FEW_TOKENS: Final = 32  # of a pass that shows hot experts; more tokens use nearly all experts
_PATIENCE: Final = 4.0  # how much longer than expected a lender may take, beside REACTION_S

ReadExpert = Callable[[int, memoryview], None]


@dataclass(frozen=True, slots=True)
class _Message:
    """Sent work."""

    lender: RemoteLender
    selection: Selection
    pending: PendingWork
    num_experts: int


class RemoteExperts:
    """All lenders of one process."""

    def __init__(
        self,
        addresses: Iterable[Address],
        token: bytes,
        borrowing: Borrowing,
        size: ExpertSize,
        cache: ExpertCache,
        read: ReadExpert,
    ) -> None:
        """Begin to connect; several threads may call `read`, which reads an expert from disk."""
        self.split = Split(size)
        self.size = size
        self.cache = cache
        self.num_experts, self.num_layers = borrowing.num_experts, borrowing.num_layers
        self._read = read
        cache.use_counts()  # from now on
        self.placed = np.zeros(borrowing.num_layers * borrowing.num_experts, bool)  # what lenders have
        self._trials: dict[int, Trial] = {}  # by octaves of tokens
        self._judged: tuple[Trial, int] | None = None  # of this pass, with its tokens
        self._is_used: bool | None = None  # whether this pass uses lenders; None: not asked yet
        self._has_new_speed = False  # a lender, since the pass began
        self._is_hot: NDArray[np.bool_] | None = None  # which experts deserve a slot here; None: not asked in this pass
        self.lenders: list[RemoteLender] = []
        self.lenders += [RemoteLender(address, token, borrowing, size, self) for address in addresses]

    def begin_pass(self) -> None:
        """Begin a pass: find the hot experts again."""
        self._is_hot = self._is_used = self._judged = None
        if self._has_new_speed:
            self._has_new_speed = False
            self._trials.clear()

    def end_pass(self, seconds: float) -> None:
        """Receive how long a pass took."""
        if self._judged is not None:
            trial, num_tokens = self._judged
            trial.end_pass(1, seconds / num_tokens)

    @property
    def trials(self) -> list[Trial]:
        """Whether passes are faster with lenders, by their size."""
        return [self._trials[octave] for octave in sorted(self._trials)]

    def send(
        self, layer: int, experts: Sequence[int], hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> SentWork | None:
        """Send the work that lenders compute faster; None if they have no experts, or this pass does not use them.

        Shapes: hidden [T, H], topk_ids and topk_weights [T, K]; `experts` are those of topk_ids.
        """
        if not self._uses_lenders(len(hidden)):
            return None
        counts = torch.bincount(topk_ids.view(-1), minlength=self.num_experts).tolist()
        is_there = self.cache.is_there(layer, layer + 1)[0]
        candidates = self._candidates(layer, experts, counts, is_there, len(hidden))
        named = {it.expert for it in candidates}
        here = [expert for expert in experts if is_there[expert]]
        absent = [expert for expert in experts if not is_there[expert] and expert not in named]
        chosen = self.split.choose(
            candidates,
            {number: lender.cost for number, lender in enumerate(self.lenders)},
            here=(len(here), sum(counts[expert] for expert in here)),
            on_disk=(len(absent), sum(counts[expert] for expert in absent)),
            num_tokens=len(hidden),
        )
        sent = SentWork(self, layer, is_there, counts)
        for number, lender in enumerate(self.lenders):
            if its := [it.expert for it in chosen if it.lender == number]:
                sent.send(lender, its, hidden, topk_ids, topk_weights)
        if sent.experts:
            self.cache.use_elsewhere(layer, sorted(sent.experts))
        return sent

    def close(self) -> None:
        """End all lenders' threads."""
        for lender in self.lenders:
            lender.close()

    def _uses_lenders(self, num_tokens: int) -> bool:
        """Return whether the pass uses lenders; if not, prefetching ignores them."""
        if self._is_used is None and self.placed.any():
            trial = self._trial_of(num_tokens)
            self._judged, self._is_used = (trial, num_tokens), trial.is_on
            self._tell_cache()
        return bool(self._is_used and self.placed.any())

    def _trial_of(self, num_tokens: int) -> Trial:
        octave = num_tokens.bit_length()
        if octave not in self._trials:
            first = 1 << octave - 1
            name = f"remote experts, passes of {first} to {2 * first - 1} tokens"
            self._trials[octave] = Trial(name)
        return self._trials[octave]

    def _tell_cache(self) -> None:
        """Keep the cache from prefetching experts that lenders compute."""
        self.cache.is_elsewhere[:] = self.placed if self._is_used else False

    def _candidates(
        self, layer: int, experts: Sequence[int], counts: Sequence[int], is_there: NDArray[np.bool_], num_tokens: int
    ) -> list[Candidate]:
        """Return the experts that lenders may compute, without hot ones that deserve a slot here."""
        first = layer * self.num_experts
        is_hot = self._hot() if num_tokens <= _FEW_TOKENS else np.zeros(len(self.cache.is_elsewhere), bool)
        found = []
        for expert in experts:
            if is_there[expert] or is_hot[first + expert]:
                continue
            for number, lender in enumerate(self.lenders):
                if lender.has[first + expert] and lender.client is not None:
                    found.append(Candidate(expert, number, counts[expert]))
                    break
        return found

    def _hot(self) -> NDArray[np.bool_]:
        """Return the experts of all layers that deserve a slot here."""
        if self._is_hot is None:
            uses, resident = self.cache.use_counts(), self.cache.is_there(0, self.num_layers).ravel()
            self._is_hot = uses > hot_enough(uses, resident, has_free_slot=self.cache.has_free_slot)
        return self._is_hot

    # Called by the lenders' threads.

    def next_move(self, held: NDArray[np.bool_], num_slots: int) -> LendingMove | None:
        """See `Placing`."""
        resident = self.cache.is_there(0, self.num_layers).ravel()
        return next_move(
            self.cache.use_counts(),
            resident,
            self.placed,
            held,
            num_slots=num_slots,
            num_experts=self.num_experts,
        )

    def read(self, number: int, into: memoryview) -> None:
        """See `Placing`."""
        self._read(number, into)

    def has_changed(self) -> None:
        """See `Placing`."""
        self.placed[:] = sum((lender.has for lender in self.lenders), np.zeros(1, bool))
        self._tell_cache()

    def has_new_speed(self) -> None:
        """See `Placing`."""
        self._has_new_speed = True


class SentWork:
    """The work of a layer at lenders."""

    def __init__(self, remote: RemoteExperts, layer: int, is_there: NDArray[np.bool_], counts: Sequence[int]) -> None:
        self.experts: set[int] = set()
        self._remote, self._layer = remote, layer
        self._is_there, self._counts = is_there, counts
        self._messages: list[_Message] = []
        self._start_s = time.perf_counter()

    def send(
        self, lender: RemoteLender, experts: list[int], hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> None:
        """Send a lender its part."""
        client = lender.client
        is_wanted = torch.zeros(self._remote.num_experts, dtype=torch.bool)
        is_wanted[experts] = True
        whole = Selection.of(topk_ids, topk_weights, is_wanted)
        parts = whole.in_messages(min(max_rows(hidden.shape[1], topk_ids.shape[1]), _MAX_ROWS))
        if client is None or len(parts) > _MAX_MESSAGES:
            return
        self.experts.update(experts)
        for part in parts:
            pending = client.submit(part.work(self._layer, hidden))
            self._messages.append(_Message(lender, part, pending, len(experts)))

    def note_computed_here(self, experts: Sequence[int]) -> None:
        """Observe the time of these experts' computation, since all work was sent."""
        seconds = time.perf_counter() - self._start_s
        split = self._remote.split
        pairs_here = [self._counts[expert] for expert in experts if self._is_there[expert]]
        read = [self._counts[expert] for expert in experts if not self._is_there[expert]]
        if read:
            resident_s = split.resident.seconds(len(pairs_here), sum(pairs_here))
            split.disk.observe(max(seconds - resident_s, seconds / 2), len(read), sum(read))
        elif pairs_here:
            split.resident.observe(seconds, len(pairs_here), sum(pairs_here))

    def collect(self, pairs: Tensor) -> list[int]:
        """Write results to the rows of their pairs; return the experts without results.

        Blocks: until all results have arrived, or are late. Shapes: pairs [T * K, H].
        """
        missing: set[int] = set()
        for message in self._messages:
            try:
                self._take(message, pairs)
            except GroupError:
                message.lender.lose()
                missing.update(message.selection.expert_ids.flatten().tolist())
        return sorted(missing - {self._remote.num_experts})

    def _take(self, message: _Message, pairs: Tensor) -> None:
        """Take one result. Raises: GroupError if there is none."""
        lender, selection = message.lender, message.selection
        num_rows, top_k = selection.expert_ids.shape
        num_pairs = len(selection.pairs)
        expected_s = lender.cost.seconds(message.num_experts, num_pairs, num_rows) * len(self._messages)
        start_s = time.perf_counter()
        result = message.pending.result(REACTION_S + _PATIENCE * expected_s)
        lender.counters.waited_s += time.perf_counter() - start_s
        if result.status is not Status.DONE:
            raise GroupError(f"{lender.where} has lost experts that it received")
        pairs.index_copy_(0, selection.pairs, result.pairs)
        num_bytes = work_bytes(num_rows, top_k, pairs.shape[1]) + result_bytes(num_pairs, pairs.shape[1])
        lender.counters.num_pairs += num_pairs
        lender.counters.num_bytes += num_bytes
        lender.cost.observe(
            message.num_experts,
            num_pairs,
            num_bytes,
            elapsed_s=message.pending.arrived_s - message.pending.submitted_s,
            waited_s=result.waited_s,
            computed_s=result.computed_s,
        )
