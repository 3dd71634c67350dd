"""The interface that allocates a model's weights, layer by layer; `allocation/` has a class for each form of weights.

Weights are torch tensors, or packed for the CPU kernels. Both split into `Destination`s: the parts that a checkpoint
knows by name, which a loader fills.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from moeflow.kernels.arrays import FLOAT32, Array, shape_alone, split
from moeflow.kernels.cpu.latent_weights import PackedUpProjection, UpProjectionShape
from moeflow.kernels.cpu.packed_experts import SWIGLU, ExpertKind
from moeflow.kernels.cpu.packed_weight import PackedStack, PackedWeight
from moeflow.kernels.expert_biases import ExpertBiases
from moeflow.kernels.triton.planar_rows import split_rows
from moeflow.kernels.triton.planar_stack import PlanarStack
from moeflow.kernels.triton.planar_weights import PlanarWeights
from moeflow.models.layers.allocation.weight_formats import MatrixRole
from moeflow.models.layers.expert_weights import Destination, ExpertTensors, ExpertWeights
from moeflow.models.layers.rearranged import Rearranged
from moeflow.parallel.blocks import band_blocks
from moeflow.parallel.columns import Columns
from moeflow.parallel.group import Group, Sums

if TYPE_CHECKING:
    from torch import Tensor

    from moeflow.kernels.arrays import Device, DType
    from moeflow.kernels.capacity import ExpertCapacity

Weight: TypeAlias = "Tensor | PackedWeight"
StackedWeight: TypeAlias = "Weight | PackedStack | PlanarWeights | PlanarStack"
HeadWeight: TypeAlias = "Weight | PlanarWeights"
# topk_ids [T, K] of a layer, and the input of its router, [T, H]; None where that was not kept
OnRoute = Callable[[Array, Array | None], None]


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The shape of a layer's experts, or of a dense network as one expert."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    kind: ExpertKind = SWIGLU


@dataclass(frozen=True, slots=True)
class WeightAllocator:
    """Allocates shapes alone; each subclass allocates weights in another form, to be filled.

    The methods of subclasses raise MemoryError, or RuntimeError from torch.
    """

    dtype: DType  # of activations and of weights that are not packed
    device: Device  # None: arrays are NumPy's
    _: KW_ONLY
    tensor_group: Group | None = None  # the ranks that cut attention, dense layers and the output projection
    capacity: ExpertCapacity | None = None  # None: experts take all tokens that choose them
    own_layers: range | None = None  # the layers of this process's stage; None: all
    on_route: OnRoute | None = None  # receives each layer's choice, in order

    @property
    def bits_per_value(self) -> float:
        """Bits of a weight, as nearly all have."""
        return 0

    @property
    def is_filled(self) -> bool:
        """Whether memory has the weights already."""
        return False

    @property
    def has_networks(self) -> bool:
        """Whether `network` makes a dense network as one expert; else it is made of matrices."""
        return False

    @property
    def rearranges(self) -> bool:
        """Whether a checkpoint's tensors are loaded in the order, and in the parts, that a pass reads."""
        return False

    @property
    def joins_shared(self) -> bool:
        """Whether a shared expert may lie behind the others, in their format."""
        return self.rearranges

    def has_one_format(self, names: Iterable[str]) -> bool:
        """Return whether projections have one format, so that their rows may lie in any order."""
        return True

    @property
    def has_cached_experts(self) -> bool:
        """Whether experts come from a cache."""
        return False

    def columns(self, name: str, count: int) -> Columns | None:
        """Return how `tensor_group` cuts `count` outputs; None: it does not. `name` is for errors of the exchange."""
        group = self.tensor_group
        return None if group is None else self.columns_of(group, name, band_blocks(count, group.size))

    def units(self, count: int) -> Columns | None:
        """Return the same of the hidden units of a dense network."""
        return self.columns("units", count)

    def columns_of(self, group: Group, name: str, blocks: Sequence[range]) -> Columns:
        """Return the same for given blocks."""
        return Columns(group, name, blocks)

    @property
    def sums(self) -> Sums | None:
        """What adds up the results of ranks on devices; None: ranks compute whole sums."""
        return None

    def elsewhere(self) -> WeightAllocator:
        """Return an allocator for the layers of other stages."""
        return shapes_only()

    def in_layer(self, layer_idx: int) -> WeightAllocator:
        """Return an allocator for the weights of that layer."""
        return self

    def empty(self, *shape: int) -> Array:
        """Return a weight that stays an array."""
        return shape_alone(shape)

    def empty_float32(self, *shape: int) -> Array:
        """Return an array of float32, whatever the type of the others."""
        return self.empty(*shape)

    def ones(self, size: int) -> Array:
        """Return a vector of ones, which no checkpoint has."""
        return self.empty(size)

    def matrix(self, role: MatrixRole, rows: int, cols: int, own: Sequence[range] | None = None) -> Weight:
        """Return a matrix outside layers; if given, only its blocks `own` of rows, one below the other."""
        return self.empty(rows if own is None else sum(map(len, own)), cols)

    def head(self, rows: int, cols: int, own: Sequence[range] | None = None) -> HeadWeight:
        """Return the output projection where it is no table of embeddings; `own` as in `matrix`."""
        return self.matrix("head", rows, cols, own)

    def stacked(self, parts: Mapping[str, int], cols: int, own: Mapping[str, range] | None = None) -> StackedWeight:
        """Return matrices one below the other, with their numbers of rows by the names of `LayerFormats`.

        `own` are the rows of each that this rank has; None: all.
        """
        return self.empty(sum(parts.values()) if own is None else sum(map(len, own.values())), cols)

    def up_projection(self, dims: UpProjectionShape) -> Array | PackedUpProjection:
        """Return latent attention's matrix from latents to keys and values: [H * (N + V), L]."""
        return self.empty(dims.rows, dims.latent_dim)

    def router(self, num_experts: int, hidden_size: int, *, is_float32: bool = False) -> Weight:
        """Return the matrix of a router; `is_float32`: of that type, unless it is packed."""
        return self.empty(num_experts, hidden_size)

    def router_bias(self, num_experts: int, *, is_float32: bool = False) -> Array:
        """Return the bias of a router's scores, in their type."""
        return self.empty(num_experts)

    def expert_biases(self, shape: ExpertShape) -> ExpertBiases:
        """Return the biases of a layer's experts, which every rank and replica has whole."""
        up = self.empty(shape.num_experts, shape.kind.num_ups * shape.intermediate_size)
        return ExpertBiases(up, self.empty(shape.num_experts, shape.hidden_size))

    def experts(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """Return a layer's experts, to be filled through their `parts`, if they have any."""
        return self._in_arrays(shape, biases)

    def _in_arrays(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertTensors:
        """Return experts in two arrays, in the device's memory."""
        count, hidden, width = shape.num_experts, shape.hidden_size, shape.intermediate_size
        gate_up = self.empty(count, shape.kind.num_ups * width, hidden)
        return ExpertTensors(gate_up, self.empty(count, hidden, width), shape.kind, biases)

    def network(self, shape: ExpertShape, biases: ExpertBiases | None = None) -> ExpertWeights:
        """Return a dense network as one expert, where `has_networks`."""
        raise NotImplementedError

    def for_shared(self) -> WeightAllocator:
        """Return an allocator for the matrices of a layer's shared expert, where `shared_network` makes none."""
        return self

    def shared_network(self, shape: ExpertShape) -> ExpertWeights | None:
        """Return a layer's shared expert, which never moves; None: it is made of matrices."""
        return None


def shapes_only() -> WeightAllocator:
    """Return an allocator that allocates nothing."""
    return WeightAllocator(FLOAT32, None)


def rows_of(weight: StackedWeight, parts: Collection[range]) -> Sequence[Destination]:
    """Return parts one below the other, each of some rows of a checkpoint's tensor: of all, unless others have some."""
    sizes = [len(rows) for rows in parts]
    if isinstance(weight, PlanarStack):
        return weight.split(sizes)
    if isinstance(weight, PlanarWeights):
        return split_rows(weight, 0, sizes)
    if not isinstance(weight, PackedWeight | PackedStack):
        return split(weight, sizes)
    return [replace(part, first=rows.start) for part, rows in zip(weight.split(sizes), parts, strict=True)]


def own_rows_of(weight: StackedWeight, own: Sequence[range]) -> Sequence[Destination]:
    """Return parts one below the other, each with those rows of a checkpoint's tensor that a rank has."""
    parts = rows_of(weight, own)
    if isinstance(weight, PackedWeight | PackedStack):
        return parts
    return [Rearranged([(part, [rows])]) for part, rows in zip(parts, own, strict=True)]


def whole(weight: Weight) -> Destination:
    """Return all of it as one destination."""
    return weight.split([weight.rows])[0] if isinstance(weight, PackedWeight) else weight
