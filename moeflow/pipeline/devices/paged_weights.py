"""Streamed weights: cut into pages, staged in pinned memory, and kept on the device for two layers.

The streamed part of a layer is contiguous in main memory. A pass cuts it into one page per micro-batch, so that no
small transfer waits for a whole layer. Device and staging memory hold two layers each: one half fills while the other
is in use. Where all weights are pinned, staging copies nothing. The page table records the layer of each half, and the
pages that have arrived. It stops a pipeline that overwrites pages in use, or computes with missing ones.
Source: MoE-Lightning 4.1 and A.1.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from torch import Tensor

from moeflow.pipeline.devices.offload_device import OffloadDevice, Seconds

NUM_HALVES: Final = 2
_ALIGNMENT: Final = 64  # bytes, of where a page begins


class PagedWeights:
    """The streamed parts of all layers."""

    def __init__(self, parts: Sequence[Tensor], device: OffloadDevice, on_device: Tensor | None = None) -> None:
        """Take each layer's part: [bytes] uint8 in main memory, empty if all of the layer stays on the device.

        `on_device` [2, bytes] has room for the largest in either half; None: it is allocated.

        Raises: CapacityError if two of the largest do not fit on the device.
        """
        self._parts = tuple(parts)
        self._device = device
        self._num_pages = 1
        self._skipped = [0] * len(parts)
        self._lock = threading.Lock()  # of the two tables
        self._uploads: list[tuple[int, Seconds]] = []
        half_bytes = max((part.numel() for part in parts), default=0)
        if on_device is None:
            buffer = device.allocate(NUM_HALVES * half_bytes, "two layers' streamed weights")
            on_device = buffer.view(NUM_HALVES, half_bytes)
        self._on_device = _Halves(on_device, "the device")
        self._are_pinned = device.pin([part for part in parts if len(part)])
        staged_bytes = 0 if self._are_pinned else half_bytes
        staged = device.allocate_pinned(NUM_HALVES * staged_bytes).view(NUM_HALVES, staged_bytes)
        self._staged = _Halves(staged, "pinned memory")

    def halves(self, layer: int) -> list[Tensor]:
        """Return the two halves of device memory for a layer's part: [bytes] uint8 each."""
        return [half[: self._parts[layer].numel()] for half in self._on_device.memory]

    def begin_pass(self, num_pages: int, skipped: Sequence[int] | None = None) -> bool:
        """Cut layers into so many pages from now on; incomplete layers in pages of another size are dropped.

        `skipped` bytes at the beginning of each layer's part are not transferred: the pass does not need them. Returns
        whether complete layers on the device may be used; they are dropped if this pass needs more of their bytes.
        """
        skipped = list(skipped or [0] * len(self._parts))
        is_enough = all(before <= now for before, now in zip(self._skipped, skipped, strict=True))
        is_same = skipped == self._skipped and num_pages == self._num_pages
        with self._lock:
            self._on_device.forget(keeps_whole_layers=is_enough, keeps_pages=is_same)
            self._staged.forget(keeps_whole_layers=False, keeps_pages=is_same)
            self._num_pages, self._skipped = num_pages, skipped
        return is_enough

    def forget(self) -> None:
        """Drop all pages after a failed pass."""
        with self._lock:
            self._on_device.forget()
            self._staged.forget()
        self._uploads.clear()

    def uploads(self) -> list[tuple[int, float]]:
        """Return the bytes and seconds of each transfer since the last call. The device is idle."""
        found = [(num_bytes, seconds()) for num_bytes, seconds in self._uploads]
        self._uploads.clear()
        return found

    def stage(self, layer: int, page: int | None = None) -> int:
        """Copy a page, or all of them, to pinned memory; return the bytes copied.

        Raises: RuntimeError if both halves are in use.
        """
        num_bytes = 0
        for number in self._numbers(page):
            with self._lock:
                half = self._staged.place(layer, number, self._num_pages)
            if not self._are_pinned:
                source = self._page(self._streamed(layer, self._parts[layer]), number)
                self._page(self._streamed(layer, half), number).copy_(source)
                num_bytes += source.numel()
            with self._lock:
                self._staged.arrived(layer, number)
        return num_bytes

    def load(self, layer: int, page: int | None = None) -> int:
        """Copy a page, or all of them, from pinned memory to the device; return the bytes copied.

        Raises: RuntimeError if it was not staged, or if both halves are in use.
        """
        num_bytes = 0
        for number in self._numbers(page):
            with self._lock:
                staged = self._staged.held(layer, number)
                target = self._on_device.place(layer, number, self._num_pages)
            source = self._parts[layer] if self._are_pinned else staged
            source, target = (self._page(self._streamed(layer, half), number) for half in (source, target))
            self._uploads.append((source.numel(), self._device.upload(target, source)))
            num_bytes += source.numel()
            with self._lock:
                self._on_device.arrived(layer, number)
                self._staged.take_out(layer)
        return num_bytes

    def half_of(self, layer: int) -> int:
        """Return the number of a layer's half. Raises: RuntimeError if a page of it is missing."""
        with self._lock:
            return self._on_device.whole(layer)

    def release(self, layer: int) -> None:
        """Free a layer's half."""
        with self._lock:
            self._on_device.drop(layer)

    def _numbers(self, page: int | None) -> range:
        return range(self._num_pages) if page is None else range(page, page + 1)

    def _streamed(self, layer: int, half: Tensor) -> Tensor:
        """Return the transferred bytes of a layer in a half."""
        return half[self._skipped[layer] : self._parts[layer].numel()]

    def _page(self, part: Tensor, number: int) -> Tensor:
        step = -(-part.numel() // (self._num_pages * _ALIGNMENT)) * _ALIGNMENT
        return part[number * step : (number + 1) * step]


class _PageRow:
    """A row of a page table."""

    def __init__(self, half: int, num_pages: int) -> None:
        self.half = half
        self.is_there = [False] * num_pages
        self.num_taken_out = 0


class _Halves:
    """Two halves of a memory, and the page table of the layers in them."""

    def __init__(self, memory: Tensor, name: str) -> None:
        self.memory = memory  # [2, bytes] uint8
        self._name = name
        self._table: dict[int, _PageRow] = {}
        self._turns = list(range(NUM_HALVES))  # the least recently assigned first

    def place(self, layer: int, page: int, num_pages: int) -> Tensor:
        """Return the half for the next page; a layer gets its half with its first page.

        Halves take turns: a device may still compute with the previous layer.
        """
        if layer not in self._table:
            taken = {row.half for row in self._table.values()}
            half = next((half for half in self._turns if half not in taken), None)
            if half is None:
                layers = " and ".join(map(str, self._table))
                raise RuntimeError(f"the pipeline wants layer {layer} in {self._name}, which holds layers {layers}")
            self._turns.remove(half)
            self._turns.append(half)
            self._table[layer] = _PageRow(half, num_pages)
        if self._table[layer].is_there[page]:
            raise RuntimeError(f"the pipeline overwrites page {page} of layer {layer} in {self._name}")
        return self.memory[self._table[layer].half]

    def arrived(self, layer: int, page: int) -> None:
        self._table[layer].is_there[page] = True

    def held(self, layer: int, page: int) -> Tensor:
        """Return the half of a page."""
        row = self._table.get(layer)
        if row is None or not row.is_there[page]:
            raise RuntimeError(f"the pipeline takes page {page} of layer {layer} before it is in {self._name}")
        return self.memory[row.half]

    def take_out(self, layer: int) -> None:
        """Record that a page of this layer is no longer needed here; after the last one the half is free."""
        row = self._table[layer]
        row.num_taken_out += 1
        if row.num_taken_out == len(row.is_there):
            del self._table[layer]

    def whole(self, layer: int) -> int:
        """Return the half of a complete layer."""
        row = self._table.get(layer)
        if row is None or not all(row.is_there):
            raise RuntimeError(f"the pipeline computes with layer {layer} before all of it is in {self._name}")
        return row.half

    def drop(self, layer: int) -> None:
        self._table.pop(layer, None)

    def forget(self, *, keeps_whole_layers: bool = False, keeps_pages: bool = False) -> None:
        if not keeps_pages:
            self._table = {layer: row for layer, row in self._table.items() if keeps_whole_layers and all(row.is_there)}
