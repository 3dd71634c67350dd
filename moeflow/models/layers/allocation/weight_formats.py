"""The formats of packed weights, by kind of matrix and by layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Final, Literal, TypeAlias

import msgspec

from moeflow.kernels.weight_format import LAYER_PARTS, LayerFormats, WeightFormat

MatrixRole: TypeAlias = Literal["embeddings", "head", "layer_table", "other"]  # of a matrix outside layers
# Matrices without a field of their own in `LayerFormats`, and the field that has their format.
_FORMATS_OF: Final = {
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3", "wi", "wi_0", "wi_1"), "up"),
    **dict.fromkeys(("down_proj", "w2", "wo"), "down"),
    **dict.fromkeys(("in_proj", "in_proj_qkv", "in_proj_qkvz"), "q_proj"),
    **dict.fromkeys(("in_proj_a", "in_proj_b", "in_proj_ba"), "k_proj"),
    "in_proj_z": "v_proj",
    "out_proj": "o_proj",
    "q_a_proj": "q_proj",
    "q_b_proj": "q_proj",
    "kv_a_proj_with_mqa": "k_proj",
    "per_layer_input_gate": "layer_input",
    "per_layer_projection": "layer_input",
}


def field_of(name: str) -> str:
    """Return the field of `LayerFormats` that has the format of a matrix; its own name: none has."""
    return _FORMATS_OF.get(name, name)


def _on_host(name: WeightFormat) -> WeightFormat:
    return "float32" if name == "float16" else name


class WeightFormats(msgspec.Struct, frozen=True):
    """The format of each kind of matrix."""

    matrices: WeightFormat
    embeddings: WeightFormat
    routers: WeightFormat = "float32"  # small, and rounding changes which experts they choose: never in integers
    is_wide: bool = False  # whether integers meet activations of 16 bits, see `PackedWeight`
    head: WeightFormat | None = None  # of the output projection; None: as embeddings
    layer_table: WeightFormat | None = None  # of embeddings for each layer; None: as of tokens
    layers: tuple[LayerFormats, ...] = ()  # of each layer instead of `matrices`; empty: all have that

    def on_host(self, matrices: WeightFormat) -> WeightFormats:
        """Return the formats of packed weights where a GPU has these: as `moeflow pack` has them, for common files.

        The CPU has no float16. Only experts are read.
        """
        layers = tuple(
            LayerFormats(**{part: found and _on_host(found) for part, found in asdict(it).items()})
            for it in self.layers
        )
        embeddings: WeightFormat = "int8" if self.head == "int8" else _on_host(self.embeddings)
        return WeightFormats(matrices, embeddings, _on_host(self.routers), is_wide=self.is_wide, layers=layers)

    def of_matrix(self, role: MatrixRole) -> WeightFormat:
        """Return the format of a matrix outside layers; where layers differ, unnamed ones are as routers."""
        if role == "head":
            return self.head or self.embeddings
        if role == "layer_table":
            return self.layer_table or self.embeddings
        if role == "embeddings":
            return self.embeddings
        return self.routers if self.layers else self.matrices

    @property
    def up_projections(self) -> WeightFormat:
        """That of latent attention's matrices from latents to keys and values, which are packed transposed in part.

        It holds any values: the rounding is small against that of activations.
        """
        return "float32" if self.matrices == "float32" or self.is_wide else "bfloat16"

    def of_projection(self, name: str, layer: LayerFormats | None) -> WeightFormat:
        """Return the format of a projection of a layer; `layer` None: all layers have the same formats."""
        part = field_of(name)
        return self.matrices if layer is None or part not in LAYER_PARTS else layer.of(part)

    def of_experts(self, layer: LayerFormats | None) -> tuple[WeightFormat, WeightFormat]:
        """Return the formats of a layer's gates and ups, and of its downs."""
        return (self.matrices, self.matrices) if layer is None else (layer.up, layer.down)

    def joins_shared(self, layer: LayerFormats | None) -> bool:
        """Return whether a layer's shared expert has the formats of the others."""
        return self.of_shared(layer) == self.of_experts(layer)

    def of_shared(self, layer: LayerFormats | None) -> tuple[WeightFormat, WeightFormat]:
        """Return the same of a shared expert."""
        up, down = self.of_experts(layer)
        return (up, down) if layer is None else (layer.of("shared_up"), layer.of("shared_down"))
