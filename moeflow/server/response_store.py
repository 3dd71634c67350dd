"""Responses that clients may come back to: in memory, so many bytes, for so long after they were last used.

A response that follows another one keeps that alive: a conversation expires as a whole. Knows no field of them but
their ids.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from moeflow.core.units import MIB
from moeflow.server.guard.strict_json import count_containers

MAX_BYTES: Final = 64 * MIB
LIFETIME_S: Final = 24 * 3600.0
_AROUND_BYTES: Final = 1024  # of an entry, beside its texts


@dataclass(frozen=True, slots=True)
class History:
    """A conversation up to a response: lists of items as JSON, input and output of each turn."""

    lists: list[bytes]
    num_containers: int  # lists and objects in them

    @property
    def num_bytes(self) -> int:
        """Size of the JSON."""
        return sum(map(len, self.lists))

    def items(self) -> list[dict[str, Any]]:
        """Decode all items."""
        return [item for items in self.lists for item in msgspec.json.decode(items)]


@dataclass(slots=True)
class _StoredResponse:
    response: bytes  # JSON
    items: bytes  # JSON: the input, without earlier turns
    output: bytes  # JSON: a copy from the response, so that a history need not decode its tools
    previous_id: str | None
    used_at_s: float
    num_containers: int  # of items and output

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + len(self.output) + _AROUND_BYTES


class ResponseStore:
    """Responses by id."""

    def __init__(
        self,
        *,
        max_bytes: int = MAX_BYTES,
        lifetime_s: float = LIFETIME_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._lifetime_s = lifetime_s
        self._clock = clock
        self._entries: OrderedDict[str, _StoredResponse] = OrderedDict()  # the one used longest ago first
        self.num_bytes = 0

    def put(self, response: dict[str, Any], items: bytes, previous_id: str | None) -> None:
        """Keep a response and its input items (JSON). Evict the least recently used ones for it."""
        output = msgspec.json.encode(response["output"])
        entry = _StoredResponse(
            response=msgspec.json.encode(response),
            items=items,
            output=output,
            previous_id=previous_id,
            used_at_s=self._clock(),
            num_containers=count_containers(items) + count_containers(output),
        )
        if entry.num_bytes > self._max_bytes:
            return
        self._entries[response["id"]] = entry
        self.num_bytes += entry.num_bytes
        self._make_room()

    def response(self, response_id: str) -> dict[str, Any] | None:
        """Return a response; None: there is none, or no more."""
        entry = self._use(response_id)
        return None if entry is None else msgspec.json.decode(entry.response)

    def items(self, response_id: str) -> list[dict[str, Any]] | None:
        """Return what went into a response; None: there is none, or no more."""
        entry = self._use(response_id)
        return None if entry is None else msgspec.json.decode(entry.items)

    def history(self, response_id: str) -> History | None:
        """Return the conversation up to a response, its own output included; None: a part is missing."""
        found: list[_StoredResponse] = []
        next_id: str | None = response_id
        while next_id is not None:
            entry = self._use(next_id)
            if entry is None:
                return None
            found.append(entry)
            next_id = entry.previous_id
        return History(
            lists=[items for entry in reversed(found) for items in (entry.items, entry.output)],
            num_containers=sum(entry.num_containers for entry in found),
        )

    def delete(self, response_id: str) -> bool:
        """Forget a response; return whether there was one."""
        entry = self._entries.pop(response_id, None)
        self.num_bytes -= 0 if entry is None else entry.num_bytes
        return entry is not None

    def _use(self, response_id: str) -> _StoredResponse | None:
        self._make_room()
        entry = self._entries.get(response_id)
        if entry is not None:
            entry.used_at_s = self._clock()
            self._entries.move_to_end(response_id)
        return entry

    def _make_room(self) -> None:
        """Remove old responses, and ones beyond the limit."""
        too_old_s = self._clock() - self._lifetime_s
        while self._entries:
            response_id, oldest = next(iter(self._entries.items()))
            if self.num_bytes <= self._max_bytes and oldest.used_at_s > too_old_s:
                return
            self.delete(response_id)


class Conversations(Protocol):
    """Responses that others can follow, wherever they are kept."""

    def put(self, response: dict[str, Any], items: bytes, previous_id: str | None) -> None:
        """See `ResponseStore.put`."""

    async def history(self, response_id: str) -> History | None:
        """See `ResponseStore.history`."""


class OwnConversations:
    """Those of a store in this process."""

    def __init__(self, store: ResponseStore) -> None:
        self.put = store.put
        self._store = store

    async def history(self, response_id: str) -> History | None:
        """See `ResponseStore.history`."""
        return self._store.history(response_id)
