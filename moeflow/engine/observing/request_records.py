"""The passes and experts of single requests: of running ones and of the last finished ones, within a limit of memory.

The oldest finished requests go first. If running ones alone exceed the limit, the oldest lose the experts of their
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.engine_messages import MAX_DRAFTED_TOKENS, DraftedTree
from moeflow.core.observation import NOT_COMPUTED, PassSight, SeenDrafts, SequenceSight, TokenSequence
from moeflow.core.request import Request, RequestStatus

MAX_FINISHED: Final = 200
MAX_BYTES: Final = 32 << 20
PASS: Final = np.dtype(
    [
        ("start_s", "f8"),
        ("duration_s", "f4"),
        ("num_tokens", "u4"),
        ("num_pass_tokens", "u4"),
        ("is_prompt", "?"),
        ("num_drafted", "u2"),
        ("num_accepted", "u2"),
        ("stall_s", "f4"),
        ("read_bytes", "u8"),
    ]
)  # the fields of `PassSight`


class RequestRecord:
    """The observed passes and experts of one sequence."""

    def __init__(self, request: Request, num_layers: int, num_experts: int, top_k: int) -> None:
        self._num_experts = num_experts
        self.request_id = request.request_id
        # [positions, L, K] uint16, longer than needed; None: forgotten.
        self.routes: NDArray[np.uint16] | None = np.full((0, num_layers, top_k), NOT_COMPUTED, np.uint16)
        self._request: Request | None = request  # while it runs
        self._passes = np.zeros((8, PASS.itemsize), np.uint8)
        self._num_passes = 0
        self._drafts: list[bytes] = []  # each a `SeenDrafts` in msgpack
        self._num_drafted_tokens = 0
        self._token_ids = np.zeros(0, np.int32)  # once it does not run
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._submitted_s = request.submitted_s
        self._num_cached_tokens, self._queued_s = 0, 0.0

    @property
    def is_running(self) -> bool:
        """Whether more may be observed."""
        return self._request is not None

    @property
    def num_bytes(self) -> int:
        """Memory that it takes."""
        routes = 0 if self.routes is None else self.routes.nbytes
        drafts = sum(map(len, self._drafts))
        return routes + self._passes.nbytes + self._token_ids.nbytes + drafts

    def settle(self) -> None:
        """Keep the tokens of a finished request instead of the request."""
        request = self._request
        if request is not None and request.status is RequestStatus.FINISHED:
            self._num_cached_tokens, self._queued_s = request.num_cached_tokens, request.queued_s or 0.0
            self._token_ids = np.array(request.token_ids(0, request.num_tokens), np.int32)
            self._request = None

    def add_passes(self, rows: NDArray[np.uint8]) -> None:
        """Add passes, each the bytes of a `PASS`: [n, itemsize]. Their starts are on the engine's clock."""
        needed = self._num_passes + len(rows)
        if needed > len(self._passes):
            number = max(needed - len(self._passes), len(self._passes))
            self._passes = np.concatenate([self._passes, np.zeros((number, PASS.itemsize), np.uint8)])
        self._passes[self._num_passes : needed] = rows
        self._num_passes = needed

    def add_drafts(self, first: int, tree: DraftedTree) -> None:
        """Add the drafts of a pass whose first token has this place among the output."""
        self._num_drafted_tokens += len(tree.token_ids)
        if self._num_drafted_tokens <= MAX_DRAFTED_TOKENS:
            self._drafts.append(msgspec.msgpack.encode(SeenDrafts(first, tree)))

    def write(self, positions: NDArray[np.int64], routes: NDArray[np.uint16], layers: slice = slice(None)) -> None:
        """Write the routes of computed tokens. Shapes: positions [n], routes [n, layers, K]. The last write counts."""
        if self.routes is None or not len(positions):
            return
        needed = int(positions.max()) + 1
        if needed > len(self.routes):
            number = max(needed - len(self.routes), len(self.routes))
            more = np.full((number, *self.routes.shape[1:]), NOT_COMPUTED, np.uint16)
            self.routes = np.concatenate([self.routes, more])
        self.routes[positions, layers] = routes

    def sight(self) -> SequenceSight:
        """Return its passes and counts."""
        request = self._request
        if request is not None:
            num_tokens, cached, queued_s = request.num_tokens, request.num_cached_tokens, request.queued_s or 0.0
        else:
            num_tokens, cached, queued_s = len(self._token_ids), self._num_cached_tokens, self._queued_s
        return SequenceSight(
            sequence_id=self.request_id,
            is_running=request is not None,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=cached,
            num_output_tokens=num_tokens - self._num_prompt_tokens,
            queued_s=queued_s,
            submitted_s=self._submitted_s,
            passes=self._pass_sights(),
            counts=self._counts(),
            drafts=[msgspec.Raw(encoded) for encoded in self._drafts],
            output_token_ids=self._all_token_ids()[self._num_prompt_tokens :] if self._drafts else [],
        )

    def _pass_sights(self) -> list[PassSight]:
        rows = self._passes[: self._num_passes].copy().view(PASS).ravel()
        rows["start_s"] -= self._submitted_s
        return [PassSight(*row) for row in rows.tolist()]

    def _counts(self) -> bytes:
        """Return how many tokens each expert got, [L, E] int64; empty: forgotten."""
        if self.routes is None:
            return b""
        num_layers = self.routes.shape[1]
        layers = np.broadcast_to(np.arange(num_layers).reshape(1, -1, 1), self.routes.shape)
        is_computed = self.routes != NOT_COMPUTED
        keys = layers[is_computed] * self._num_experts + self.routes[is_computed]
        return np.bincount(keys, minlength=num_layers * self._num_experts).astype("<i8").tobytes()

    def tokens(self) -> TokenSequence:
        """Return its tokens with their experts."""
        token_ids = self._all_token_ids()
        experts = b""
        if self.routes is not None:
            known = self.routes[: len(token_ids)]
            missing = np.full((len(token_ids) - len(known), *known.shape[1:]), NOT_COMPUTED, np.uint16)
            experts = np.concatenate([known, missing]).astype("<u2").tobytes()
        return TokenSequence(
            sequence_id=self.request_id,
            num_prompt_tokens=self._num_prompt_tokens,
            token_ids=token_ids,
            experts=experts,
        )

    def _all_token_ids(self) -> list[int]:
        request = self._request
        if request is not None:
            return request.token_ids(0, request.num_tokens)
        token_ids: list[int] = self._token_ids.tolist()
        return token_ids


class RequestRecords:
    """The records of one engine, ordered by their begin."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        max_bytes: int = MAX_BYTES,
        max_finished: int = MAX_FINISHED,
    ) -> None:
        self._shape = num_layers, num_experts, top_k
        self._max_bytes, self._max_finished = max_bytes, max_finished
        self._records: dict[Request, RequestRecord] = {}
        self._finished: list[RequestRecord] = []  # in the order of their ends

    def of(self, request: Request) -> RequestRecord:
        """Return the record of a request in a pass."""
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = RequestRecord(request, *self._shape)
        return record

    def settle(self) -> None:
        """Note which requests have finished, and keep within the limits."""
        for request in [request for request in self._records if request.status is RequestStatus.FINISHED]:
            record = self._records.pop(request)
            record.settle()
            self._finished.append(record)
        del self._finished[: max(len(self._finished) - self._max_finished, 0)]
        excess = self.num_bytes - self._max_bytes
        while excess > 0 and self._finished:
            excess -= self._finished.pop(0).num_bytes
        for record in self._records.values():
            if excess > 0 and record.routes is not None:
                excess -= record.routes.nbytes
                record.routes = None

    @property
    def num_bytes(self) -> int:
        """Memory that all records take."""
        return sum(record.num_bytes for record in self._all())

    def find(self, request_id: str) -> list[RequestRecord]:
        """Return the sequences of a request, or one sequence, by its id; of several with one id the newest."""
        found = {
            record.request_id: record
            for record in self._all()
            if record.request_id == request_id or record.request_id.startswith(f"{request_id}-")
        }
        return list(found.values())

    def _all(self) -> Iterator[RequestRecord]:
        yield from self._finished
        yield from self._records.values()
