"""Adds observed passes to counts and records, several passes at once: a pass alone is too little work for NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from moeflow.core.batch import BatchEntry
from moeflow.core.request import Request
from moeflow.engine.observing.expert_counts import ExpertCounts, RoutedSum
from moeflow.engine.observing.observed_pass import ObservedPass, RowSpan, first_rows, positions_of
from moeflow.engine.observing.request_records import RequestRecords
from moeflow.engine.observing.routing_tap import ExpertIds

Spans = Callable[[Sequence[BatchEntry]], list[RowSpan]]


class LayerGroup(msgspec.Struct, frozen=True):
    """Layers with routers that get the same rows of a pass."""

    layers: range  # numbered from 0
    spans: Spans  # the rows of each entry


class _GroupRows(msgspec.Struct):
    """What several passes brought for a group of layers."""

    group: LayerGroup
    ids: list[ExpertIds] = []  # of each pass
    requests: list[tuple[Request, int]] = []  # with their numbers of rows, in order
    positions: list[NDArray[np.int64]] = []


class PassFolding:
    """Adds the passes of one model."""

    def __init__(self, groups: Sequence[LayerGroup], counts: ExpertCounts, records: RequestRecords) -> None:
        self._groups, self._counts, self._records = groups, counts, records
        self.num_unseen = 0  # passes whose choices did not arrive as expected, which are not counted

    def fold(self, passes: Sequence[ObservedPass], second: int) -> None:
        """Add passes that ended in this second, in their order."""
        seen = [one for one in passes if self._is_seen(one)]
        self.num_unseen += len(passes) - len(seen)
        for one in passes:
            self._add_pass_rows(one)
        found = self._sum_of_nothing()
        found.tokens = sum(one.num_rows for one in seen)
        for rows in self._rows_of_groups(seen):
            self._add_rows(rows, found)
        for one in seen:
            self._add_loads(one)
            self._add_drafts(one)
        if seen:
            self._counts.last_pass = self._sum_of(seen[-1])
        self._counts.add(second, found, len(seen))
        self._records.settle()

    def _is_seen(self, one: ObservedPass) -> bool:
        """Return whether all groups of layers reported as many rows as they got."""
        if len(one.choices) != len(self._groups):
            return False
        for group, ids in zip(self._groups, one.choices, strict=True):
            expected = sum(span.num_rows for span in group.spans(one.entries))
            if (0 if ids is None else ids.shape[1]) != expected:
                return False
        return True

    def _rows_of_groups(self, passes: Sequence[ObservedPass]) -> Iterator[_GroupRows]:
        for number, group in enumerate(self._groups):
            rows = _GroupRows(group)
            for one in passes:
                ids = one.choices[number]
                if ids is not None:
                    spans = group.spans(one.entries)
                    rows.ids.append(ids)
                    rows.positions.append(positions_of(one.entries, spans))
                    entries = zip(one.entries, spans, strict=True)
                    rows.requests += [(entry.request, span.num_rows) for entry, span in entries]
            if rows.ids:
                yield rows

    def _add_rows(self, rows: _GroupRows, found: RoutedSum) -> None:
        """Add to the sum of the passes, and to each request's record."""
        ids, positions = np.concatenate(rows.ids, axis=1), np.concatenate(rows.positions)
        layers = rows.group.layers
        places = {request: place for place, request in enumerate(dict(rows.requests))}
        owners = np.repeat([places[request] for request, _ in rows.requests], [number for _, number in rows.requests])
        order = np.argsort(owners, kind="stable")
        ends = np.cumsum(np.bincount(owners, minlength=len(places)))
        for request, of_request in zip(places, np.split(order, ends[:-1]), strict=True):
            record, own = self._records.of(request), ids[:, of_request]
            counts = self._counted(own)
            record.counts[layers.start : layers.stop] += counts
            found.counts[layers.start : layers.stop] += counts
            is_token = positions[of_request] >= 0
            routes = own[:, is_token].transpose(1, 0, 2).astype(np.uint16)
            record.write(positions[of_request[is_token]], routes, slice(layers.start, layers.stop))
        found.tokens_of_layers[layers.start : layers.stop] += ids.shape[1]

    def _add_loads(self, one: ObservedPass) -> None:
        for ids in one.choices:
            if ids is not None and ids[0].size >= self._num_experts:
                self._counts.add_load(self._counted(ids), ids[0].size)

    def _add_drafts(self, one: ObservedPass) -> None:
        """Write the routes of accepted drafts to their positions. Drafts are for decoders, which are one group."""
        (ids, *_) = one.choices or (None,)
        if ids is None or not any(entry.tree for entry in one.entries):
            return
        for entry, first_row in zip(one.entries, first_rows(one.entries), strict=True):
            if kept := one.kept(entry):
                rows = first_row + entry.num_tokens + np.array(kept)
                routes = ids[:, rows].transpose(1, 0, 2).astype(np.uint16)
                self._records.of(entry.request).write(np.arange(entry.stop, entry.stop + len(kept)), routes)

    def _add_pass_rows(self, one: ObservedPass) -> None:
        for entry in one.entries:
            self._records.of(entry.request).add_pass(
                (
                    one.start_s,
                    one.duration_s,
                    entry.num_tokens,
                    one.num_rows,
                    entry.start < len(entry.request.prompt_token_ids),
                    len(entry.tree),
                    len(one.kept(entry)),
                    one.stall_s,
                    one.read_bytes,
                )
            )

    def _sum_of(self, one: ObservedPass) -> RoutedSum:
        found = self._sum_of_nothing()
        found.tokens = one.num_rows
        for group, ids in zip(self._groups, one.choices, strict=True):
            if ids is not None:
                found.counts[group.layers.start : group.layers.stop] = self._counted(ids)
                found.tokens_of_layers[group.layers.start : group.layers.stop] = ids.shape[1]
        return found

    def _counted(self, ids: ExpertIds) -> NDArray[np.int64]:
        """Return how often each expert was chosen. Shapes: ids [layers, T, K] -> [layers, E]."""
        num_layers, size = len(ids), self._num_experts
        keys = ids + np.arange(0, num_layers * size, size).reshape(-1, 1, 1)
        return np.bincount(keys.ravel(), minlength=num_layers * size).reshape(num_layers, size)

    @property
    def _num_experts(self) -> int:
        return self._counts.num_experts

    def _sum_of_nothing(self) -> RoutedSum:
        return RoutedSum(self._counts.num_layers, self._counts.num_experts)
