"""A layer's experts in memory that all ranks map: each whole, and each rank's slices of all.

The process that starts the ranks packs them once; a rank computes with the weights of its layout. Experts differ from
each other, but are made of the same random numbers: values do not matter to speed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moeflow.kernels.cpu.packed_experts import ExpertKind, PackedExperts, expert_bytes
from moeflow.planner.hardware.host import host_resources
from studies.parallel.case import LayerShape

ALIGNMENT = 64  # bytes, as kernels want it
SCALE = 0.05  # of weights


def slice_bounds(width: int, num_ranks: int) -> list[int]:
    """Return where each rank's slice of the hidden units begins, and the end; widths differ by one at most."""
    return [rank * width // num_ranks for rank in range(num_ranks + 1)]


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """The memory, seen by one process."""

    layer: LayerShape
    memory: Tensor  # [bytes] uint8

    @classmethod
    def make_descriptor(cls, layer: LayerShape, on_expert: Callable[[], None] = lambda: None) -> int:
        """Pack all experts into memory that processes inherit. Raises: OSError."""
        descriptor = os.memfd_create("moeflow-experts")
        os.ftruncate(descriptor, shared_bytes(layer))
        shared = cls.open(layer, descriptor)
        experts = enumerate(make_experts(layer))
        with ThreadPoolExecutor(host_resources().num_cores) as threads:
            for _ in threads.map(lambda numbered: shared._fill(*numbered), experts):
                on_expert()
        return descriptor

    @classmethod
    def open(cls, layer: LayerShape, descriptor: int) -> SharedWeights:
        """Map what a descriptor names."""
        return cls(layer, torch.frombuffer(mmap.mmap(descriptor, 0), dtype=torch.uint8))

    def whole(self, experts: list[int]) -> PackedExperts:
        """Return some experts, one after the other."""
        rows = self.whole_rows()
        return self._experts([rows[expert] for expert in experts], self.layer.width)

    def whole_rows(self) -> Tensor:
        """Return the memory of all experts, [E, bytes]."""
        return self._rows(self.layer.width, 0)

    def slices(self, rank: int, experts: list[int] | None = None) -> PackedExperts:
        """Return a rank's slices of some experts, one after the other; None: of all."""
        start, stop = slice_bounds(self.layer.width, self.layer.num_ranks)[rank : rank + 2]
        rows = self._rows(stop - start, self._slices_at(rank))
        return self._experts([rows[expert] for expert in experts or range(len(rows))], stop - start)

    def _fill(self, expert: int, matrices: tuple[Tensor, Tensor]) -> None:
        gate_up, down = matrices
        self._pack(self._rows(self.layer.width, 0)[expert], gate_up, down)
        for rank, (start, stop) in enumerate(pairwise(slice_bounds(self.layer.width, self.layer.num_ranks))):
            units = torch.cat([half[start:stop] for half in torch.split(gate_up, self.layer.width)])
            self._pack(self._rows(stop - start, self._slices_at(rank))[expert], units, down[:, start:stop])

    def _pack(self, row: Tensor, gate_up: Tensor, down: Tensor) -> None:
        packed = PackedExperts.pack(gate_up[None], down[None], self.layer.weights, function=self.layer.function)
        row[: len(packed.storage[0])] = packed.storage[0]

    def _experts(self, rows: list[Tensor], width: int) -> PackedExperts:
        layer = self.layer
        kind = ExpertKind(layer.function, layer.is_gated)
        return PackedExperts(len(rows), layer.hidden, width, layer.weights, kind=kind, storage=rows)

    def _slices_at(self, rank: int) -> int:
        widths = [stop - start for start, stop in pairwise(slice_bounds(self.layer.width, self.layer.num_ranks))]
        return self.layer.num_experts * sum(
            row_bytes(self.layer, width) for width in (self.layer.width, *widths[:rank])
        )

    def _rows(self, width: int, at: int) -> Tensor:
        """Return the memory of all experts of a width, [E, bytes]."""
        num_bytes = self.layer.num_experts * row_bytes(self.layer, width)
        return self.memory[at : at + num_bytes].view(self.layer.num_experts, -1)


def row_bytes(layer: LayerShape, width: int) -> int:
    """Return what one expert of a width takes."""
    num_bytes = expert_bytes(layer.hidden, width, layer.weights, is_gated=layer.is_gated)
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def shared_bytes(layer: LayerShape) -> int:
    """Return what the experts of a layer take: each whole, and each in slices."""
    widths = [stop - start for start, stop in pairwise(slice_bounds(layer.width, layer.num_ranks))]
    return layer.num_experts * sum(row_bytes(layer, width) for width in (layer.width, *widths))


def make_experts(layer: LayerShape) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each expert's matrices: gate_up [2I, H] (gate first), without a gate [I, H], and down [H, I]."""
    random = torch.Generator().manual_seed(0)
    halves = 2 if layer.is_gated else 1
    gate_up = torch.randn(halves * layer.width, layer.hidden, generator=random) * SCALE
    down = torch.randn(layer.hidden, layer.width, generator=random) * SCALE
    for expert in range(layer.num_experts):
        yield gate_up.roll(expert, 0), down
