"""Adds observed passes to counts and records, several passes at once: a pass alone is too little work for NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.batch import BatchEntry
from moeflow.engine.observing.expert_counts import ExpertCounts, RoutedSum
from moeflow.engine.observing.observed_pass import ObservedPass, RowSpans, first_rows, positions_of
from moeflow.engine.observing.request_records import PASS, RequestRecord, RequestRecords
from moeflow.engine.observing.routing_tap import ExpertIds

Spans = Callable[[Sequence[BatchEntry]], RowSpans]
Numbers = NDArray[np.int64]


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers with routers that get the same rows of a pass."""

    layers: range  # numbered from 0
    spans: Spans  # the rows of each entry

    @property
    def places(self) -> slice:
        """The layers as an index of arrays."""
        return slice(self.layers.start, self.layers.stop)


class PassFolding:
    """Adds the passes of one model."""

    def __init__(self, groups: Sequence[LayerGroup], counts: ExpertCounts, records: RequestRecords) -> None:
        self._groups, self._counts, self._records = groups, counts, records
        self.num_unseen = 0  # passes whose choices did not arrive as expected, which are not counted

    def fold(self, passes: Sequence[ObservedPass], second: int) -> None:
        """Add passes that ended in this second, in their order."""
        self._add_passes(passes)
        seen = [one for one in passes if self._is_seen(one)]
        self.num_unseen += len(passes) - len(seen)
        if seen:
            self._counts.add(second, self._sum_of(seen, self._counts.add_load), len(seen))
            self._counts.last_pass = self._sum_of(seen[-1:])
            for number, group in enumerate(self._groups):
                self._write_routes(number, group, seen)
            for one in seen:
                self._write_drafts(one)
        self._records.settle()

    def _is_seen(self, one: ObservedPass) -> bool:
        """Return whether all groups of layers reported as many rows as they got."""
        if len(one.choices) != len(self._groups):
            return False
        numbers = [sum(group.spans(one.entries).numbers) for group in self._groups]
        return numbers == [0 if ids is None else ids.shape[1] for ids in one.choices]

    def _sum_of(
        self, passes: Sequence[ObservedPass], add_load: Callable[[Numbers, int], None] | None = None
    ) -> RoutedSum:
        """Return the sum of passes; `add_load` gets the counts of each pass that is large enough to show loads."""
        found = RoutedSum(self._counts.num_layers, self._counts.num_experts)
        found.tokens = sum(one.num_rows for one in passes)
        for number, group in enumerate(self._groups):
            small: list[ExpertIds] = []
            for ids in (one.choices[number] for one in passes):
                if ids is None:
                    continue
                found.tokens_of_layers[group.places] += ids.shape[1]
                if ids[0].size < self._counts.num_experts:
                    small.append(ids)
                    continue
                counts = self._counted(ids)
                found.counts[group.places] += counts
                if add_load is not None:
                    add_load(counts, ids[0].size)
            if small:
                found.counts[group.places] += self._counted(np.concatenate(small, axis=1))
        return found

    def _counted(self, ids: ExpertIds) -> Numbers:
        """Return how often each expert was chosen. Shapes: ids [layers, T, K] -> [layers, E]."""
        num_layers, size = len(ids), self._counts.num_experts
        keys = ids + np.arange(0, num_layers * size, size).reshape(-1, 1, 1)
        return np.bincount(keys.ravel(), minlength=num_layers * size).reshape(num_layers, size)

    def _write_routes(self, number: int, group: LayerGroup, passes: Sequence[ObservedPass]) -> None:
        """Write the experts of tokens, without drafted ones, for a group of layers."""
        asked = [(one, ids) for one in passes if (ids := one.choices[number]) is not None]
        if not asked:
            return
        entries = [entry for one, _ in asked for entry in one.entries]
        spans = group.spans(entries)
        routes = np.concatenate([_by_row(ids) for _, ids in asked])
        positions = positions_of(entries, spans)
        for record, rows in self._by_record(entries, spans.numbers):
            own = positions[rows]
            is_token = own >= 0
            if not is_token.all():
                rows, own = rows[is_token], own[is_token]
            record.write(own, routes[rows], group.places)

    def _write_drafts(self, one: ObservedPass) -> None:
        """Write the routes of accepted drafts to their positions. Drafts are for decoders, which are one group."""
        (ids, *_) = one.choices or (None,)
        if ids is None or not any(entry.tree for entry in one.entries):
            return
        for entry, first_row in zip(one.entries, first_rows(one.entries), strict=True):
            if kept := one.kept(entry):
                rows = first_row + entry.num_tokens + np.array(kept)
                positions = np.arange(entry.stop, entry.stop + len(kept))
                self._records.of(entry.request).write(positions, _by_row(ids[:, rows]))

    def _add_passes(self, passes: Sequence[ObservedPass]) -> None:
        """Add each pass to the records of its requests."""
        entries = [entry for one in passes for entry in one.entries]
        rows = np.empty(len(entries), PASS)
        sizes = [len(one.entries) for one in passes]
        for name in ("start_s", "duration_s", "stall_s", "read_bytes"):
            rows[name] = np.repeat([getattr(one, name) for one in passes], sizes)
        rows["num_pass_tokens"] = np.repeat([one.num_rows for one in passes], sizes)
        rows["num_tokens"] = [entry.num_tokens for entry in entries]
        rows["is_prompt"] = [entry.start < len(entry.request.prompt_token_ids) for entry in entries]
        rows["num_drafted"] = [len(entry.tree) for entry in entries]
        rows["num_accepted"] = [len(one.kept(entry)) if entry.tree else 0 for one in passes for entry in one.entries]
        packed = rows.view(np.uint8).reshape(len(rows), PASS.itemsize)  # NumPy selects rows of bytes faster
        for record, own in self._by_record(entries, [1] * len(entries)):
            record.add_passes(packed[own])

    def _by_record(
        self, entries: Sequence[BatchEntry], num_rows: Sequence[int]
    ) -> Iterator[tuple[RequestRecord, NDArray[Any]]]:
        """Yield each request's record with the places of its rows, ascending, where entries have so many rows each."""
        places = {request: place for place, request in enumerate(dict.fromkeys(entry.request for entry in entries))}
        if len(places) == 1:
            yield self._records.of(entries[0].request), np.arange(sum(num_rows))
            return
        owners = np.repeat([places[entry.request] for entry in entries], num_rows)
        ends = np.cumsum(np.bincount(owners, minlength=len(places)))
        parts = np.split(np.argsort(owners, kind="stable"), ends[:-1])
        yield from ((self._records.of(request), part) for request, part in zip(places, parts, strict=True))


def _by_row(ids: ExpertIds) -> NDArray[np.uint16]:
    """Return choices row by row. Shapes: ids [layers, T, K] -> [T, layers, K]."""
    return ids.transpose(1, 0, 2).astype(np.uint16, order="C")
