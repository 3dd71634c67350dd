"""Copies of packed experts to the GPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from moeflow.core.units import MIB
from moeflow.experts.hybrid.hybrid_experts import HybridExperts, HybridLayers, SlotMatrices
from moeflow.experts.hybrid.lanes import Event, Lanes
from moeflow.kernels.packed_bands import ExpertLayout, store

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = MIB  # of a copy: the exchange within a layer waits for one piece at most


class SlabBuffer:
    """Memory on the GPU for some packed experts of one layer."""

    def __init__(self, count: int, layers: HybridLayers, lanes: Lanes) -> None:
        """Allocate it for experts of any layer. Raises: RuntimeError from torch."""
        shape = (count, layers.largest_bytes)
        self._lanes = lanes
        self._rows = torch.empty(shape, dtype=torch.uint8, device=layers.device)
        # Experts from disk pass through here, since their slots in main memory may change at once.
        is_pinned = layers.disk is not None and layers.device.type == "cuda"
        self._on_host = torch.empty(shape if layers.disk else (0, 0), dtype=torch.uint8, pin_memory=is_pinned)
        self._copied: Event | None = None

    def copy(self, experts: HybridExperts, numbers: Sequence[int], *, is_scan: bool = False) -> Event:
        """Start the copies of experts of a layer, in a row; return an event behind them. `is_scan` as in `slabs`.

        Blocks: while experts come from disk. Raises: StorageError if one of them cannot be read.
        """
        if self._copied is not None and len(self._on_host):
            self._copied.synchronize()
        slabs = experts.slabs(numbers, self._on_host, is_scan=is_scan)
        with self._lanes.copying():
            for row, slab in zip(self._rows, slabs, strict=False):
                target = row[: experts.layout.num_bytes]
                for start in range(0, len(target), PIECE_BYTES):
                    stop = min(start + PIECE_BYTES, len(target))
                    target[start:stop].copy_(slab[start:stop], non_blocking=True)
        self._copied = self._lanes.copied()
        return self._copied

    def store(self, count: int, layout: ExpertLayout, matrices: SlotMatrices, first: int) -> None:
        """Write the first experts to consecutive slots, on the current stream."""
        gate_up, down = layout.plain(self._rows[:count])
        store(gate_up, matrices.gate_up, first)
        store(down, matrices.down, first)


class PinnedMemory:
    """Main memory that a GPU copies by itself."""

    def __init__(self, blocks: list[Tensor], device: torch.device) -> None:
        """Pin tensors as long as this is open, as many as the system allows. Copies of others take longer."""
        self._pinned: list[Tensor] = []
        if device.type != "cuda":
            return
        with torch.cuda.device(device):
            for block in blocks:
                result = torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)  # type: ignore[no-untyped-call]
                try:
                    torch.cuda.check_error(result)
                except torch.cuda.CudaError as error:
                    with suppress(RuntimeError):
                        torch.zeros(1, device=device)  # takes the error, which the next kernel would report
                    logger.warning("some experts reach the GPU slowly, since their memory cannot be pinned: %s", error)
                    break
                self._pinned.append(block)

    def close(self) -> None:
        """Let the memory go."""
        while self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())  # type: ignore[no-untyped-call]
