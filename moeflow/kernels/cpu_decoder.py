"""All layers of a decoder by the CPU extension in one call, so that a pass of one token is kernels and little else.

The results are those of the layers' stages one after another, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moeflow.kernels import cpu
from moeflow.kernels.attention_metadata import AttentionMetadata
from moeflow.kernels.cpu import PackedWeight
from moeflow.kernels.cpu_arguments import address, check_floats
from moeflow.kernels.cpu_stages import MoEStage
from moeflow.kernels.heads import Heads
from moeflow.kernels.kv_blocks import KVBlocks

if cpu.is_available():
    import moeflow.kernels._cpu as _cpu


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The weights of one layer."""

    qkv: PackedWeight
    qkv_bias: Tensor | None
    input_norm: Tensor  # [H]
    heads: Heads
    sliding_window: int | None
    stage: MoEStage  # what follows attention


class PackedDecoder:
    """The layers of one model."""

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        self._layers = tuple(layers)  # whose memory the handles look at
        self._handles = [_bind(layer) for layer in layers]

    def __call__(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, blocks: Sequence[KVBlocks], metadata: AttentionMetadata
    ) -> Tensor:
        """Return what comes out of the last layer, in `hidden`'s memory; K and V of every token go to `blocks`.

        Shapes: hidden [T, H] float32; cos and sin [T, 1, D] from `rotary_table`; blocks one a layer.
        """
        first = self._layers[0]
        num_tokens = hidden.shape[0]
        check_floats(hidden, (num_tokens, first.qkv.cols))
        check_floats(cos, (num_tokens, 1, first.heads.head_dim))
        check_floats(sin, (num_tokens, 1, first.heads.head_dim))
        masks = metadata.tree_masks
        _cpu.decoder(
            self._handles,
            [layer.handle for layer in blocks],
            hidden.data_ptr(),
            num_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            metadata.slots.data_ptr(),
            len(metadata.spans),
            metadata.table.buffer_info()[0],
            address(masks),
        )
        return hidden


def _bind(layer: PackedLayer) -> object:
    heads, stage = layer.heads, layer.stage
    row = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    if layer.qkv.rows != row or stage.o_proj.cols != heads.num_heads * heads.head_dim:
        raise ValueError(f"{layer.qkv}, {heads} and {stage.o_proj} do not fit together")
    check_floats(layer.input_norm, (layer.qkv.cols,))
    return _cpu.DecoderLayer(
        qkv=layer.qkv.handle,
        qkv_bias=address(layer.qkv_bias),
        input_norm=layer.input_norm.data_ptr(),
        num_heads=heads.num_heads,
        q_norm=address(heads.q_norm),
        k_norm=address(heads.k_norm),
        norm_all_heads=heads.norms_all_heads,
        clip=heads.clip or 0.0,
        sliding_window=layer.sliding_window or 0,
        o_proj=stage.o_proj.handle,
        o_bias=address(stage.o_bias),
        norm=stage.norm.data_ptr(),
        eps=stage.eps,
        router=None if stage.router is None else stage.router.handle,
        experts=stage.experts.handle,
        top_k=stage.choose.top_k,
        renormalize=stage.choose.renormalize,
    )
