"""Layers that get an input of their own for each token, from a table of embeddings for all layers (Gemma 4's small
models).

The table is large, but a token reads one row of it: of packed weights that are mapped, it stays on disk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from moeflow.core.embedding_config import LayerEmbeddings
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.activation import apply
from moeflow.kernels.arrays import Array
from moeflow.kernels.cpu.layer_input import PackedLayerInput
from moeflow.kernels.cpu.packed_weight import PackedStack, PackedWeight
from moeflow.kernels.embedding import embedding
from moeflow.kernels.linear import linear
from moeflow.kernels.scaling import scaled
from moeflow.models.layers.expert_weights import Destination
from moeflow.models.layers.linear import Linear
from moeflow.models.layers.norm import Norm
from moeflow.models.layers.weight_allocator import WeightAllocator, whole

if TYPE_CHECKING:
    from torch import Tensor

TABLE_NAME = "model.embed_tokens_per_layer.weight"


class LayerEmbedding:
    """What layers get of a token's embedding e: `(norm(projection(e)) + row of the table) / sqrt(2)`, each scaled."""

    def __init__(self, config: ModelConfig, sizes: LayerEmbeddings, allocator: WeightAllocator) -> None:
        self._size, self._num_layers = sizes.size, config.num_layers
        num_values = config.num_layers * sizes.size
        self._table = allocator.matrix("layer_table", sizes.vocab_size, num_values)
        self._projection = allocator.matrix("other", num_values, config.hidden_size)
        self._projection_scale = config.hidden_size**-0.5
        self._norm = Norm(allocator, sizes.size, config.norms.eps)

    def __call__(self, token_ids: Array, embedded: Array) -> Array:
        """Return the inputs of all layers. Shapes: token_ids [T] int64, embedded [T, H] -> [T, L, P]."""
        shape = (len(token_ids), self._num_layers, self._size)
        projected = scaled(linear(embedded, self._projection), self._projection_scale)
        normed = self._norm(projected.reshape(-1, self._size)).reshape(shape)
        rows = scaled(embedding(token_ids, self._table), math.sqrt(self._size))
        return scaled(normed + rows.reshape(shape), math.sqrt(0.5))

    def named_weights(self) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield TABLE_NAME, whole(self._table)
        yield "model.per_layer_model_projection.weight", whole(self._projection)
        yield from self._norm.named_weights("model.per_layer_projection_norm")


class LayerInput:
    """What a layer makes of its own input, at last: `(h + norm(projection(function(gate(h)) * input))) * scale`."""

    def __init__(self, config: ModelConfig, sizes: LayerEmbeddings, allocator: WeightAllocator, layer_idx: int) -> None:
        first_layer = 0 if allocator.own_layers is None else allocator.own_layers.start
        self._number = layer_idx - first_layer  # of those whose inputs a pass brings
        self._function = config.feed_forward.hidden_act
        self._gate = Linear(allocator, config.hidden_size, {"per_layer_input_gate": sizes.size})
        self._projection = Linear(allocator, sizes.size, {"per_layer_projection": config.hidden_size})
        self._norm = Norm.of(config, allocator)
        self._scale = allocator.empty(1) if config.norms.has_layer_scales else None
        self.packed = self._pack()

    def __call__(self, hidden: Tensor, inputs: Tensor) -> Tensor:
        """Return hidden states, which are used up, with what the layer's input brings.

        Shapes: hidden [T, H], inputs of all layers [T, L, P] -> [T, H].
        """
        if self.packed is not None:
            return self.packed(hidden, inputs, self._number)
        units = apply(self._function, self._gate(hidden)) * inputs[:, self._number]
        return self._norm.add(hidden, self._projection(units), self._scale)

    def matrix_names(self, prefix: str) -> dict[str, list[str]]:
        """Return the checkpoint names of the matrices that each field of `LayerFormats` is about."""
        names = (*self._gate.parts, *self._projection.parts)
        return {"layer_input": [f"{prefix}.{name}.weight" for name in names]}

    def named_weights(self, prefix: str) -> Iterator[tuple[str, Destination]]:
        """Yield (checkpoint name, destination)."""
        yield from self._gate.named_weights(prefix)
        yield from self._projection.named_weights(prefix)
        yield from self._norm.named_weights(f"{prefix}.post_per_layer_input_norm")
        if self._scale is not None:
            yield f"{prefix}.layer_scalar", self._scale

    def _pack(self) -> PackedLayerInput | None:
        gate, projection = self._gate.weight, self._projection.weight
        if not isinstance(gate, PackedWeight) or not isinstance(projection, PackedWeight):
            assert not isinstance(gate, PackedStack), "it is one matrix"
            return None
        return PackedLayerInput(gate, projection, self._norm.weights, self._function, self._scale)
