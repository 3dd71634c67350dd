"""The layers of a decoder by the CPU extension in one call, so that a pass of one token is kernels and little else.

Where only some experts are in memory, the call returns at a layer that needs others, and is made again for the rest.
The results are those of the layers' stages one after another, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moeflow.kernels.arrays import Array, address, floats_like, ids_like
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.heads import Heads
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.attention.scores import Scores
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import check_floats
from moeflow.kernels.cpu.latent_attention import PackedLatents
from moeflow.kernels.cpu.packed_weights import PackedWeight
from moeflow.kernels.cpu.row_ops import check_interleaved, check_rotary
from moeflow.kernels.cpu.stages import MoEStage, bind_norm
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.rotary import RotaryTable

if extension.is_available():
    import moeflow.kernels._cpu as _cpu


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """The weights of one layer."""

    qkv: Sequence[PackedWeight]  # one, or some one below the other
    qkv_bias: Array | None
    input_norm: NormWeights
    heads: Heads
    scores: Scores  # without a bias
    rotary: int | None  # which of a pass's tables it rotates by; None: it does not
    stage: MoEStage  # what follows attention
    latents: PackedLatents | None = None  # of latent attention: `heads` are then those that meet latents

    @property
    def hidden(self) -> int:
        """The size of hidden states."""
        return self.qkv[0].cols

    @property
    def qkv_rows(self) -> int:
        """Values of a token that `qkv` has to make."""
        heads = self.heads
        if self.latents is not None:
            return self.latents.projected_size
        return (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim

    @property
    def attended_size(self) -> int:
        """Values of a token that attention returns."""
        return self.heads.num_heads * (self.heads.head_dim if self.latents is None else self.latents.heads.value_dim)


# (input [T, H], topk_ids [T, K], topk_weights [T, K], residual [T, H]) -> residual plus each token's experts [T, H]
Experts = Callable[[Array, Array, Array, Array], Array]


@dataclass(frozen=True, slots=True)
class Expected:
    """Which experts layers with routers will probably need: a pass stops where one is absent.

    `routers_ahead`: those that the router so many layers ahead would choose now, of layers with routers, and at the
    first one all routers up to there; 0: none is asked. `guesses`: of the next such layer those that are not 0,
    [layers with routers, E] uint8.
    """

    routers_ahead: int = 0
    guesses: Array | None = None


NOTHING: Final = Expected()


class PackedDecoder:
    """The layers of one model. Those with routers have as many experts each, and choose as many."""

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        self.layers = tuple(layers)  # whose memory the handles look at
        self.routed = [number for number, layer in enumerate(layers) if layer.stage.router is not None]
        self.has_slots = any(layer.stage.slots is not None for layer in layers)
        self._handles = [_bind(layer) for layer in layers]
        self._num_tables = max((0 if layer.rotary is None else layer.rotary + 1 for layer in layers), default=0)
        stages = [layers[number].stage for number in self.routed]
        self._top_k = stages[0].choose.top_k if stages else 0
        routers = {(stage.choose.top_k, stage.slots is None, stage.num_experts) for stage in stages}
        if len(routers) > 1:
            raise ValueError(f"layers with routers of different kinds cannot be run together: {routers}")

    def begin(
        self,
        hidden: Array,
        rotary: Sequence[RotaryTable],
        blocks: Sequence[KVBlocks],
        metadata: AttentionMetadata,
        *,
        keeps_choices: bool = False,
        keeps_inputs: bool = False,
    ) -> PackedPass:
        """Return a pass that is yet to be run; K and V of every token will go to `blocks`.

        It keeps what routers choose, and what the experts of all layers, or their dense networks, get, if asked to.

        Shapes: hidden [T, H] float32, which is changed; blocks one a layer.
        """
        first = self.layers[0]
        num_tokens = hidden.shape[0]
        check_floats(hidden, (num_tokens, first.hidden))
        for table in rotary:
            check_rotary(table, num_tokens, min(layer.heads.head_dim for layer in self.layers))
        if self._num_tables > len(rotary):
            raise ValueError(f"layers need {self._num_tables} tables of rotary positions, not {len(rotary)}")
        if len(blocks) != len(self.layers):
            raise ValueError(f"{len(self.layers)} layers need as many KV caches, not {len(blocks)}")
        keeps_choices |= self.has_slots
        topk_ids = ids_like(hidden, len(self.routed), num_tokens, self._top_k) if keeps_choices else None
        num_kept = len(self.layers) if keeps_inputs else int(self.has_slots)
        normed = floats_like(hidden, num_kept, num_tokens, first.hidden) if num_kept else None
        topk_weights = floats_like(hidden, num_tokens, self._top_k) if self.has_slots else None
        handle = _cpu.DecoderPass(
            layers=self._handles,
            caches=[layer.handle for layer in blocks],
            num_tokens=num_tokens,
            rotary=[_cpu.RotaryTable(cos=address(it.cos), sin=address(it.sin), dim=it.dim) for it in rotary],
            slots=address(metadata.slots),
            num_sequences=len(metadata.spans),
            sequences=metadata.table.buffer_info()[0],
            tree_masks=address(metadata.tree_masks),
            topk_ids=address(topk_ids),
            normed=address(normed),
            topk_weights=address(topk_weights),
            keeps_inputs=keeps_inputs,
        )
        return PackedPass(hidden, topk_ids, normed, topk_weights, self.routed, handle, (self, blocks, rotary, metadata))


@dataclass(slots=True)
class PackedPass:
    """One pass: what comes out of its layers so far, and what they are computed from."""

    hidden: Array  # [T, H]; where the pass has stopped: what the experts' sum is to be added to
    topk_ids: Array | None  # [layers with routers, T, K] int64, what routers chose as far as the pass has come
    # What goes into experts: [1, T, H], where the pass has stopped, or [layers, T, H] if each layer's is kept.
    normed: Array | None
    topk_weights: Array | None  # [T, K]; likewise
    _routed: Sequence[int]  # the layers with routers
    _handle: Any
    _memory: tuple[object, ...]  # what the handle looks at, beside the tensors above

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.hidden.shape[0]

    @property
    def num_choices(self) -> int:
        """How many experts a layer's router chooses for all tokens, those that several need once for each."""
        assert self.topk_ids is not None
        return self.topk_ids.shape[1] * self.topk_ids.shape[2]

    def choices(self, first: int, end: int) -> Array:
        """Return what routers from this one on chose, up to another: [end - first, T, K]. They must have been kept."""
        assert self.topk_ids is not None
        return self.topk_ids[first:end]

    def add_experts(self, experts: Experts, number: int) -> None:
        """Finish the layer that the pass has stopped at, of those with routers the one of this number."""
        assert self.normed is not None
        assert self.topk_weights is not None
        (topk_ids,) = self.choices(number, number + 1)
        normed = self.normed[self._routed[number] if len(self.normed) > 1 else 0]
        self.hidden = experts(normed, topk_ids, self.topk_weights, self.hidden)

    def run(self, first_layer: int = 0, expected: Expected = NOTHING, fetcher: Any = None) -> int:
        """Run layers from this one on; return the first that was not finished, or their number.

        A `SlotFetcher`, by its handle, has those experts come that are missing, and reads ahead what later routers
        would choose, as far as it was lent slots. Nobody else may move experts meanwhile.
        """
        stopped: int = self._handle.run(
            first_layer=first_layer,
            hidden=address(self.hidden),
            routers_ahead=expected.routers_ahead,
            guesses=address(expected.guesses),
            fetcher=fetcher,
        )
        return stopped


def _bind(layer: PackedLayer) -> object:
    heads, stage = layer.heads, layer.stage
    if sum(part.rows for part in layer.qkv) != layer.qkv_rows or stage.o_proj.cols != layer.attended_size:
        raise ValueError(f"{layer.qkv}, {heads} and {stage.o_proj} do not fit together")
    check_interleaved(heads)
    scores = layer.scores
    assert scores.bias is None, "a layer with relative positions is no decoder's"
    if scores.sinks is not None:
        check_floats(scores.sinks, (heads.num_heads,))
    return _cpu.DecoderLayer(
        qkv=[part.handle for part in layer.qkv],
        qkv_bias=address(layer.qkv_bias),
        input_norm=bind_norm(layer.input_norm, layer.hidden),
        num_heads=heads.num_heads,
        q_norm=address(heads.q_norm),
        k_norm=address(heads.k_norm),
        norm_all_heads=heads.norms_all_heads,
        clip=heads.clip or 0.0,
        sliding_window=scores.sliding_window or 0,
        scale=scores.scale or 0.0,
        soft_cap=scores.soft_cap or 0.0,
        sinks=address(scores.sinks),
        rotary=-1 if layer.rotary is None else layer.rotary,
        norms_last=heads.norms_last,
        is_interleaved=heads.is_interleaved,
        latent=None if layer.latents is None else layer.latents.handle,
        stage=stage.handle,
    )
