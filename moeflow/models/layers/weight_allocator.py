"""Where a model's weights are allocated, and in which form.

Weights are torch tensors, or, where the CPU kernels compute, packed in the order in which these read them. Both
forms can be cut into the parts that a checkpoint knows by name: `Destination`s, which a loader fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from moeflow.checkpoint.packed.weight_memory import FreshMemory, WeightMemory
from moeflow.core.parallel_config import SLICED, WHOLE, AttentionLayout
from moeflow.kernels.arrays import FLOAT32, Array, array_on, is_numpy, shape_alone, split
from moeflow.kernels.cpu.latent_weights import PackedUpProjection, UpProjectionShape
from moeflow.kernels.cpu.packed_experts import SWIGLU, ExpertKind, PackedExperts, expert_bytes
from moeflow.kernels.cpu.packed_weight import PackedStack, PackedWeight, matrix_bytes
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.lazy_memory import LazyMemory
from moeflow.kernels.on_demand import on_demand, torch
from moeflow.kernels.weight_format import BITS_PER_VALUE, LAYER_PARTS, LayerFormats, WeightFormat
from moeflow.models.layers.expert_weights import (
    Destination,
    ExpertSlabs,
    ExpertTensors,
    ExpertWeights,
    OffloadedExperts,
    slab_bytes,
)
from moeflow.parallel.blocks import band_blocks, shifted
from moeflow.parallel.columns import Columns
from moeflow.parallel.group import Group

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.experts.cached_experts import ExpertPool
    from moeflow.kernels.arrays import Device, DType
    from moeflow.kernels.cpu import expert_slices
    from moeflow.models.layers.expert_shares import ExpertShares
    from moeflow.models.layers.ranks import sliced_experts
    from moeflow.models.layers.ranks.expert_ranks import ExpertRanks
else:
    sliced_experts = on_demand("moeflow.models.layers.ranks.sliced_experts")
    expert_slices = on_demand("moeflow.kernels.cpu.expert_slices")

Weight: TypeAlias = "Tensor | PackedWeight"
StackedWeight: TypeAlias = "Weight | PackedStack"
# topk_ids [T, K] of a layer, and what its router was asked about, [T, H]; None where that was not kept
OnRoute = Callable[[Array, Array | None], None]
# Projections that have no field of their own in `LayerFormats`, and whose format they have.
_FORMATS_OF: Final = {
    "q_a_proj": "q_proj",
    "q_b_proj": "q_proj",
    "kv_a_proj_with_mqa": "k_proj",
    "per_layer_input_gate": "layer_input",
    "per_layer_projection": "layer_input",
}
Take = Callable[[int], Array | None]  # bytes of an expert -> memory, a row for each


class WeightFormats(msgspec.Struct, frozen=True):
    """In which format each kind of matrix is packed."""

    matrices: WeightFormat
    embeddings: WeightFormat  # and the output projection, if `head` says nothing else
    routers: WeightFormat = "float32"  # small, and rounding them changes which experts are asked: never in integers
    is_wide: bool = False  # whether integers meet activations of 16 bits, see `PackedWeight`
    head: WeightFormat | None = None
    layer_table: WeightFormat | None = None  # of embeddings for each layer; None: as of tokens
    layers: tuple[LayerFormats, ...] = ()  # of each layer instead of `matrices`; empty: all have that

    @property
    def of_layer_table(self) -> WeightFormat:
        """That of a table that embeds tokens for each layer."""
        return self.layer_table or self.embeddings

    @property
    def up_projections(self) -> WeightFormat:
        """That of latent attention's matrices from latents to keys and values, which are packed transposed in part.

        So it is one that holds any values: next to nothing is rounded, beside what becomes of activations.
        """
        return "float32" if self.matrices == "float32" or self.is_wide else "bfloat16"

    def of_experts(self, layer: LayerFormats | None) -> tuple[WeightFormat, WeightFormat]:
        """Return the formats of a layer's gates and ups, and of its downs; None: as all layers have them."""
        return (self.matrices, self.matrices) if layer is None else (layer.up, layer.down)

    def of_shared(self, layer: LayerFormats | None) -> tuple[WeightFormat, WeightFormat]:
        """Return the same of a shared expert."""
        up, down = self.of_experts(layer)
        return (up, down) if layer is None else (layer.of("shared_up"), layer.of("shared_down"))


@dataclass(frozen=True, slots=True)
class WeightAllocator:
    """Handed to each layer at construction. With `has_shapes_alone` nothing is allocated."""

    dtype: DType  # of activations and of what is not packed
    device: Device  # None: weights are NumPy's arrays, or packed in memory of such
    packed: WeightFormats | None = None  # None: nothing is
    memory: WeightMemory = field(default_factory=FreshMemory)  # where what is packed lies, and what stays beside it
    pool: ExpertPool | None = None  # experts come from there; None: all are resident
    router_dtype: DType | None = None  # of routers that are not packed; None: as all else
    has_slabs: bool = False  # experts that are not packed lie in `memory` as slabs, wherever the device is
    group: Group | None = None  # of the ranks that share the model; None: this process has all of it
    expert_ranks: ExpertRanks | None = None  # which of them has which experts, where each has whole ones
    expert_shares: ExpertShares | None = None  # which replica computes which experts; None: this one all
    expert_layout: str = WHOLE  # how they share each layer's experts,
    attention_layout: AttentionLayout = "replicated"  # and attention, dense layers and the output projection
    expert_capacity: int = 0  # tokens of an encoder's input that an expert takes; 0: all that choose it
    own_layers: range | None = None  # of the stage that this process has; None: it has all layers
    on_route: OnRoute | None = None  # told of each layer's choice, in order
    layer: LayerFormats | None = None  # of the layer that is made; None: of all alike
    has_shapes_alone: bool = False  # of what is not packed; nothing can be filled

    @property
    def bits_per_value(self) -> float:
        """Of nearly all weights."""
        return BITS_PER_VALUE[self.packed.matrices] if self.packed else self.dtype.itemsize * 8

    def empty(self, *shape: int, dtype: DType | None = None) -> Array:
        """Return a weight that stays a tensor, to be filled. Raises: as `matrix` does."""
        if self.has_shapes_alone:
            return shape_alone(shape)
        if self.packed is None:
            weight = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        else:
            weight = self.memory.block(math.prod(shape) * self.dtype.itemsize).view(self.dtype).reshape(shape)
        return weight if is_numpy(weight) else torch.nn.Parameter(weight, requires_grad=False)

    def ones(self, size: int) -> Array:
        """Return a vector of ones, which no checkpoint has."""
        if self.has_shapes_alone:
            return shape_alone((size,))
        if self.packed is not None:
            return array_on(np.ones(size, FLOAT32), self.device)
        return torch.ones(size, dtype=self.dtype, device=self.device)

    def elsewhere(self) -> WeightAllocator:
        """Return an allocator for layers that other stages have: of memory that has them all, too, it skips theirs."""
        if not self.memory.is_filled:
            return shapes_only()
        return replace(self, group=None, expert_ranks=None)

    def in_layer(self, layer_idx: int) -> WeightAllocator:
        """Return an allocator for what is in that layer."""
        if self.packed is None or not self.packed.layers:
            return self
        return replace(self, layer=self.packed.layers[layer_idx])

    @property
    def tensor_group(self) -> Group | None:
        """The ranks that cut attention, dense layers and the output projection among them; None: this one has all."""
        return self.group if self.attention_layout == "tensor" else None

    def columns(self, name: str, count: int) -> Columns | None:
        """Return how those ranks cut that many outputs; None: they do not. `name` is what is exchanged, for errors."""
        group = self.tensor_group
        return None if group is None else Columns(group, name, band_blocks(count, group.size))

    def matrix(self, rows: int, cols: int, own: Sequence[range] | None = None) -> Weight:
        """Return a matrix [rows, cols] to be filled; if given, only its blocks `own` of rows, one below the other.

        Raises: MemoryError, or RuntimeError from torch.
        """
        return self._matrix(rows, cols, self.packed.matrices if self.packed else None, own)

    def stacked(self, parts: Mapping[str, int], cols: int, own: Mapping[str, range] | None = None) -> StackedWeight:
        """Do the same for parts one below the other, of so many rows each, by the names that `LayerFormats` has.

        `own` are the rows that are wanted of each part. Neighbours in one format are one matrix.
        """
        weights: list[Weight] = []
        for weight_format, names in groupby(parts, self._format_of):
            sizes = {name: parts[name] for name in names}
            starts = accumulate(sizes.values(), initial=0)
            rows = (
                None if own is None else [shifted(own[name], start) for name, start in zip(sizes, starts, strict=False)]
            )
            weights.append(self._matrix(sum(sizes.values()), cols, weight_format, rows))
        packed = [weight for weight in weights if isinstance(weight, PackedWeight)]
        return PackedStack(packed) if len(packed) > 1 else weights[0]

    def _format_of(self, name: str) -> WeightFormat | None:
        if self.packed is None:
            return None
        if self.layer is None:
            return self.packed.matrices
        part = _FORMATS_OF.get(name, name)
        return self.layer.of(part) if part in LAYER_PARTS else self.packed.matrices

    def head(self, rows: int, cols: int, own: Sequence[range] | None = None) -> Weight:
        """Do the same for the output projection."""
        return self._matrix(rows, cols, self.packed.head or self.packed.embeddings if self.packed else None, own)

    def embedding(self, rows: int, cols: int, own: Sequence[range] | None = None) -> Weight:
        """Do the same for token embeddings."""
        return self._matrix(rows, cols, self.packed.embeddings if self.packed else None, own)

    def layer_table(self, rows: int, cols: int) -> Weight:
        """Do the same for a table that embeds tokens for each layer."""
        return self._matrix(rows, cols, self.packed.of_layer_table if self.packed else None)

    def outside_layers(self, rows: int, cols: int) -> Weight:
        """Do the same for a matrix that is in no layer: in the format of all, or where layers differ as routers."""
        packed = self.packed
        if packed is None:
            return self._matrix(rows, cols, None)
        return self._matrix(rows, cols, packed.routers if packed.layers else packed.matrices)

    def up_projection(self, dims: UpProjectionShape) -> Array | PackedUpProjection:
        """Return latent attention's matrix from latents to keys and values, to be filled: [H * (N + V), L]."""
        if self.packed is None:
            return self.empty(dims.rows, dims.latent_dim)
        packed = self.packed
        return PackedUpProjection(dims, packed.up_projections, self.memory.block, is_wide=packed.is_wide)

    def router(self, num_experts: int, hidden_size: int, *, is_float32: bool = False) -> Weight:
        """Do the same for what chooses experts; `is_float32`: in float32, unless it is packed."""
        if self.packed is not None:
            return self._matrix(num_experts, hidden_size, self.packed.routers)
        if is_float32:
            return self.empty_float32(num_experts, hidden_size)
        return self.empty(num_experts, hidden_size, dtype=self.router_dtype)

    def router_bias(self, num_experts: int, *, is_float32: bool = False) -> Array:
        """Return what is added to a router's scores, in the type of these."""
        if is_float32:
            return self.empty_float32(num_experts)
        return self.empty(num_experts, dtype=self.router_dtype)

    def empty_float32(self, *shape: int) -> Array:
        """Return a tensor in float32, whatever all else is in. Raises: as `matrix` does."""
        is_so_anyway = self.has_shapes_alone or self.packed is not None  # or of no type
        return self.empty(*shape, dtype=None if is_so_anyway else torch.float32)

    def expert_biases(
        self, num_experts: int, hidden_size: int, intermediate_size: int, kind: ExpertKind
    ) -> ExpertBiases:
        """Return a layer's biases, to be filled, which every home of its experts has whole. Raises: as `matrix`."""
        up = self.empty(num_experts, kind.num_ups * intermediate_size)
        return ExpertBiases(up, self.empty(num_experts, hidden_size))

    def experts(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        kind: ExpertKind = SWIGLU,
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        """Return a layer's experts, to be filled through their `parts` if they have some. Raises: as `matrix` does."""
        if self.pool is not None:
            return self.pool.add_layer(biases)
        if self.packed is not None:
            return self._packed_experts(num_experts, hidden_size, intermediate_size, self.packed, kind, biases)
        if self.has_slabs:
            return self._slabs(num_experts, hidden_size, intermediate_size, kind, biases)
        return ExpertTensors(
            self.empty(num_experts, (kind.num_matrices - 1) * intermediate_size, hidden_size),
            self.empty(num_experts, hidden_size, intermediate_size),
            kind,
            biases,
        )

    def _packed_experts(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        formats: WeightFormats,
        kind: ExpertKind,
        biases: ExpertBiases | None,
    ) -> ExpertWeights:
        if self.group is not None and self.expert_layout == SLICED:
            take = partial(self.memory.experts, num_experts)
            size = (hidden_size, intermediate_size)
            return self._slices(self.group, size, formats.of_experts(self.layer), take, kind, biases)
        assert (self.group is None) == (self.expert_ranks is None)
        up, down = formats.of_experts(self.layer)
        num_bytes = expert_bytes(hidden_size, intermediate_size, up, down_format=down, is_gated=kind.is_gated)
        own = None  # memory that a rank fills some of
        if self.expert_ranks is not None and not self.memory.is_filled:
            own = LazyMemory(num_experts * num_bytes)
            storage: Array | None = own.tensor.view(num_experts, num_bytes)
        else:
            storage = self.memory.experts(num_experts, num_bytes)
        if storage is None:
            return OffloadedExperts()
        experts = PackedExperts(
            num_experts,
            hidden_size,
            intermediate_size,
            up,
            down_format=down,
            kind=kind,
            is_wide=formats.is_wide,
            storage=storage,
        ).with_biases(biases)
        if self.expert_shares is not None:
            return self.expert_shares.add_layer(experts)
        return experts if self.expert_ranks is None else self.expert_ranks.add_layer(experts, own)

    def _slices(
        self,
        group: Group,
        size: tuple[int, int],
        formats: tuple[WeightFormat, WeightFormat],
        take: Take,
        kind: ExpertKind,
        biases: ExpertBiases | None = None,
    ) -> sliced_experts.SlicedExperts:
        """Return this rank's slices of as many experts as `take` returns rows of memory for; `size`: H and I."""
        assert self.packed is not None
        hidden_size, intermediate_size = size
        units, outputs = (band_blocks(count, group.size) for count in (intermediate_size, hidden_size))
        shape = expert_slices.SliceShape(
            hidden=hidden_size,
            width=intermediate_size,
            units=units[group.rank],
            outputs=outputs[group.rank],
            up_format=formats[0],
            down_format=formats[1],
            num_ups=kind.num_ups,
        )
        is_whole = self.memory.is_filled  # with whole experts, of which a rank touches its slices
        num_bytes = shape.whole_bytes if is_whole else shape.up_bytes + shape.down_bytes
        storage = take(num_bytes)
        assert storage is not None  # ranks keep their experts in memory
        own = expert_slices.PackedExpertSlices(
            shape,
            storage,
            kind=kind,
            biases=biases,
            is_wide=self.packed.is_wide,
            is_whole=is_whole,
        )
        return sliced_experts.SlicedExperts(own, Columns(group, "units", units), Columns(group, "outputs", outputs))

    @property
    def has_networks(self) -> bool:
        """Whether a dense network is the one expert of a layer, rather than tensors."""
        return self.packed is not None or self.has_slabs

    def network(
        self,
        hidden_size: int,
        intermediate_size: int,
        kind: ExpertKind = SWIGLU,
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        """Return a dense network as the one expert of a layer, to be filled likewise. It must be such a one."""
        if self.packed is None:
            return self._slabs(1, hidden_size, intermediate_size, kind, biases)
        size = (hidden_size, intermediate_size)
        if self.tensor_group is not None:
            formats = self.packed.of_experts(self.layer)
            return self._slices(self.tensor_group, size, formats, self._one_row, kind, biases)
        return self._one_network(size, kind, *self.packed.of_experts(self.layer)).with_biases(biases)

    def shared_network(self, hidden_size: int, intermediate_size: int, kind: ExpertKind) -> ExpertWeights | None:
        """Return the expert that a layer has beside those to choose from, likewise; it is in no slab that moves."""
        if self.packed is None:
            return None
        size = (hidden_size, intermediate_size)
        if self.tensor_group is not None:
            return self._slices(self.tensor_group, size, self.packed.of_shared(self.layer), self._one_row, kind)
        return self._one_network(size, kind, *self.packed.of_shared(self.layer))

    def _one_network(
        self, size: tuple[int, int], kind: ExpertKind, up: WeightFormat, down: WeightFormat
    ) -> PackedExperts:
        assert self.packed is not None
        storage = self._one_row(expert_bytes(*size, up, down_format=down, is_gated=kind.is_gated))
        return PackedExperts(1, *size, up, down_format=down, kind=kind, is_wide=self.packed.is_wide, storage=storage)

    def _one_row(self, num_bytes: int) -> Array:
        """Return the memory of a dense network as that of a layer's one expert: [1, num_bytes] uint8."""
        return self.memory.block(num_bytes).reshape(1, num_bytes)

    def _slabs(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        kind: ExpertKind,
        biases: ExpertBiases | None = None,
    ) -> ExpertSlabs:
        num_bytes = num_experts * slab_bytes(hidden_size, intermediate_size, self.dtype, kind)
        storage = self.memory.block(num_bytes).view(num_experts, -1)
        return ExpertSlabs(hidden_size, intermediate_size, self.dtype, storage, kind, biases)

    def _matrix(
        self, rows: int, cols: int, weight_format: WeightFormat | None, own: Sequence[range] | None = None
    ) -> Weight:
        if weight_format is None or self.packed is None:
            assert own is None  # ranks compute with packed weights
            return self.empty(rows, cols)
        has_whole = own is None or self.memory.is_filled
        num_rows = rows if own is None or has_whole else sum(len(block) for block in own)
        storage = self.memory.block(matrix_bytes(weight_format, num_rows, cols))
        matrix = PackedWeight(storage, weight_format, num_rows, cols, is_wide=self.packed.is_wide)
        return matrix if own is None or not has_whole else matrix.take(own)


def shapes_only() -> WeightAllocator:
    """Return an allocator for models of which only names and shapes are asked."""
    return WeightAllocator(FLOAT32, None, has_shapes_alone=True)


def rows_of(weight: StackedWeight, parts: Collection[range]) -> Sequence[Destination]:
    """Return parts one below the other, each of some rows of a checkpoint's tensor: of all, unless others have some."""
    sizes = [len(rows) for rows in parts]
    if not isinstance(weight, PackedWeight | PackedStack):
        return split(weight, sizes)
    return [replace(part, first=rows.start) for part, rows in zip(weight.split(sizes), parts, strict=True)]


def whole(weight: Weight) -> Destination:
    """Return all of it as one destination."""
    return weight.split([weight.rows])[0] if isinstance(weight, PackedWeight) else weight
