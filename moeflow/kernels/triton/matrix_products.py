"""Products of rows with a stack of matrices, started as one of the kernels of expert_kernels.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import triton

from moeflow.kernels.activation import Activation, kernel_arguments
from moeflow.kernels.on_demand import torch
from moeflow.kernels.triton.expert_kernels import expert_kernel, pair_kernel, tile_kernel
from moeflow.kernels.triton.launching import Grid, gpu_of, launch
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.kernels.triton.tile_sizes import Tile, expert_tile, pair_tile, prompt_tile

if TYPE_CHECKING:
    from torch import Tensor


class Pairs(msgspec.Struct, frozen=True):
    """The pairs of a pass: a token and one of its experts."""

    ids: Tensor  # [T, K] contiguous
    num_experts: int
    experts: range  # that are computed
    slots: Tensor | None = None  # [E] int32
    first_shared: int | None = None  # the first expert with an input of its own; None: there is none

    @property
    def num_pairs(self) -> int:
        """Tokens times choices."""
        return self.ids.numel()

    @property
    def given_slots(self) -> Tensor:
        """The table of slots, or a tensor in its place that kernels do not read."""
        return self.ids if self.slots is None else self.slots

    def inputs(self, x: Tensor, rows_share: int) -> tuple[int, int]:
        """Return from which expert on inputs lie so many rows further."""
        first = self.num_experts if self.first_shared is None else self.first_shared
        return first, len(x) - self.num_pairs // rows_share


class Matrices(msgspec.Struct, frozen=True):
    """A stack of matrices, with the operations on their outputs."""

    weights: Tensor | PlanarWeights  # [slots, num_outputs, size], with a gate [slots, 2 num_outputs, size]
    bias: Tensor | None = None  # [E, rows]
    residual: Tensor | None = None  # of the result's shape, contiguous
    is_gated: bool = False
    function: Activation | None = None

    @property
    def size(self) -> int:
        """Columns."""
        return self.weights.shape[2]

    @property
    def num_outputs(self) -> int:
        """Columns of the result."""
        return self.weights.shape[1] // self.num_matrices

    @property
    def num_matrices(self) -> int:
        """Gate and up, or one."""
        return 2 if self.is_gated else 1

    @property
    def weight_bits(self) -> int:
        """Bits of a value, without scales."""
        if isinstance(self.weights, PlanarWeights):
            return 8 * self.weights.values.element_size() if self.weights.values.dtype != torch.int32 else 4
        return 8 * self.weights.element_size()

    def by_pairs(self, x: Tensor, out: Tensor, pairs: Pairs | None, rows_share: int) -> None:
        """Compute each row of out by itself; without pairs with the only matrix."""
        top_k = 1 if pairs is None else pairs.ids.shape[1]
        tile = pair_tile(gpu_of(x), top_k, self.num_outputs, self.size, self.weight_bits, self.num_matrices)
        routing = (
            (x, x, 0, 1, 1, 0)
            if pairs is None
            else (
                pairs.ids,
                pairs.given_slots,
                pairs.experts.start,
                pairs.experts.stop,
                *pairs.inputs(x, rows_share),
            )
        )
        self._start(
            pair_kernel,
            (len(out), triton.cdiv(self.num_outputs, tile.block_n)),
            tile,
            x,
            out,
            *routing,
            rows_share=rows_share,
            has_ids=pairs is not None,
            has_slots=pairs is not None and pairs.slots is not None,
        )

    def by_experts(self, x: Tensor, out: Tensor, pairs: Pairs, rows_share: int) -> None:
        """Compute the rows of each expert together; each program looks for them."""
        tile = expert_tile(gpu_of(x), self.size, 8 * x.element_size(), self.num_matrices, is_float=self._is_float)
        self._start(
            expert_kernel,
            (triton.cdiv(self.num_outputs, tile.block_n), pairs.num_experts),
            tile,
            x,
            out,
            pairs.ids,
            pairs.given_slots,
            pairs.num_pairs,
            pairs.experts.start,
            pairs.experts.stop,
            *pairs.inputs(x, rows_share),
            rows_share=rows_share,
            has_slots=pairs.slots is not None,
            block_pairs=triton.next_power_of_2(pairs.num_pairs),
            block_m=tile.block_m,
            num_stages=tile.num_stages,
        )

    def by_tiles(self, x: Tensor, out: Tensor, pairs: Pairs, order: Tensor, spans: Tensor, rows_share: int) -> None:
        """Compute sorted pairs (see `sort_kernel`). The grid has room for a part of a tile of each expert."""
        tile = self._prompt_tile(x, pairs.num_pairs // pairs.num_experts)
        num_tiles = pairs.num_pairs // tile.block_m + min(pairs.num_experts, pairs.num_pairs)
        self._start_tiles(
            tile,
            num_tiles,
            x,
            out,
            pairs.given_slots,
            order,
            spans,
            pairs.num_pairs,
            pairs.num_experts,
            *pairs.inputs(x, rows_share),
            rows_share=rows_share,
            is_sorted=True,
            has_slots=pairs.slots is not None,
            block_experts=triton.next_power_of_2(pairs.num_experts),
        )

    def by_rows(self, x: Tensor, out: Tensor) -> None:
        """Multiply all rows by the only matrix."""
        few = expert_tile(gpu_of(x), self.size, 8 * x.element_size(), self.num_matrices, is_float=self._is_float)
        tile = few if len(out) <= few.block_m else self._prompt_tile(x, len(out))
        self._start_tiles(
            tile,
            triton.cdiv(len(out), tile.block_m),
            x,
            out,
            x,
            x,
            x,
            len(out),
            1,
            1,
            0,
            rows_share=1,
            is_sorted=False,
            has_slots=False,
            block_experts=1,
        )

    def _prompt_tile(self, x: Tensor, rows_an_expert: int) -> Tile:
        return prompt_tile(
            gpu_of(x), rows_an_expert, self.size, 8 * x.element_size(), self.num_matrices, is_float=self._is_float
        )

    def _start_tiles(self, tile: Tile, num_tiles: int, *arguments: Any, **constants: Any) -> None:
        self._start(
            tile_kernel,
            (num_tiles, triton.cdiv(self.num_outputs, tile.block_n)),
            tile,
            *arguments,
            block_m=tile.block_m,
            num_stages=tile.num_stages,
            **constants,
        )

    def _start(
        self, kernel: Any, grid: Grid, tile: Tile, x: Tensor, out: Tensor, *routing: Any, **constants: Any
    ) -> None:
        values, scales = self._planes()
        activation = kernel_arguments(self.function or "silu")
        launch(
            kernel,
            grid,
            x,
            values,
            scales,
            values if self.bias is None else self.bias,
            out if self.residual is None else self.residual,
            out,
            values.stride(0),
            scales.stride(0),
            activation["alpha"],
            activation["limit"],
            self.size,
            *routing,
            num_outputs=self.num_outputs,
            size=self.size,
            function=-1 if self.function is None else activation["function"],
            is_gated=self.is_gated,
            value_row=values.shape[2],
            scale_row=scales.shape[2],
            weight_format=self.weights.format if isinstance(self.weights, PlanarWeights) else "float",
            group=self._group,
            has_bias=self.bias is not None,
            has_residual=self.residual is not None,
            block_n=tile.block_n,
            block_k=tile.block_k,
            is_even=self.num_outputs % tile.block_n == 0 and self.size % tile.block_k == 0,
            num_warps=tile.num_warps,
            **constants,
        )

    @property
    def _is_float(self) -> bool:
        return not isinstance(self.weights, PlanarWeights)

    @property
    def _group(self) -> int:
        """Columns that share a scale. Floats have no scales: the columns that a thread loads at a time."""
        return self.weights.group if isinstance(self.weights, PlanarWeights) else 16 // self.weights.element_size()

    def _planes(self) -> tuple[Tensor, Tensor]:
        """Return values and scales, each of contiguous matrices; floats stand for the scales that they lack."""
        given = self.weights
        planes = (given.values, given.scales) if isinstance(given, PlanarWeights) else (given, given)
        assert all(plane.stride()[1:] == (plane.shape[2], 1) for plane in planes)
        return planes
