"""All layers of a model by the CPU extension in as few calls as possible: one, if all experts it needs are in memory.

With experts on disk, the extension checks the cache's table of slots after each router, and fetches missing experts
into slots lent for the pass. A layer for which that is not enough is finished here: its
experts are loaded and computed with as for any other model. Afterwards the cache is updated with these fetches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from moeflow.experts.predict.predictor import MAX_TOKENS
from moeflow.kernels.arrays import Array, on_host
from moeflow.kernels.cpu.decoder import NOTHING, PackedDecoder, PackedPass
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.rotary import Rotary
from moeflow.models.layers.context import ForwardContext
from moeflow.models.layers.decoder_layer import DecoderLayer
from moeflow.models.layers.moe import MoE
from moeflow.models.layers.weight_allocator import OnRoute, WeightAllocator

if TYPE_CHECKING:
    from moeflow.experts.cached_experts import CachedExperts
    from moeflow.pipeline.runtime.layer_times import LayerTimes


OnChoices = Callable[[Array], None]


class PackedLayers:
    """The layers of one model; its experts are in memory, or in slots."""

    def __init__(self, decoder: PackedDecoder, cached: _CachedLayers | None, on_route: OnRoute | None) -> None:
        """`on_route` receives each router's choice, in order, after a pass; for small passes with inputs."""
        # Receives the choices of all routers after a pass, [layers with routers, T, K]; may change between passes.
        self.on_choices: OnChoices | None = None
        self._decoder = decoder
        self._cached = cached
        self._on_route = on_route

    @classmethod
    def of(
        cls,
        layers: Sequence[DecoderLayer],
        rotary: Sequence[Rotary],
        out_norm: NormWeights | None,
        allocator: WeightAllocator,
    ) -> PackedLayers | None:
        """Return this rank's layers, its kinds of rotary positions, and the norm after the last layer if it has that;
        None if a layer has to be run by itself.
        """
        packed = [layer.packed() for layer in layers]
        if None in packed:
            return None
        decoder = PackedDecoder([layer for layer in packed if layer is not None], rotary, out_norm)
        if not allocator.has_cached_experts:
            return cls(decoder, None, allocator.on_route)
        routed = [layer for layer in layers if layer.has_router]
        return cls(decoder, _CachedLayers(decoder, routed), allocator.on_route)

    def first(self, num_layers: int) -> PackedLayers:
        """Return the first layers alone, over the same experts; their routers' choices are not reported."""
        whole = self._decoder
        decoder = PackedDecoder(whole.layers[:num_layers], whole.rotary, whole.out_norm)
        return PackedLayers(decoder, None if self._cached is None else self._cached.first(decoder), None)

    def __call__(self, hidden: Array, context: ForwardContext, layer_times: LayerTimes | None = None) -> PackedPass:
        """Run a pass and return it; writes K and V of every token. Its times go to `layer_times`.

        Shapes: hidden [T, H] float32, which is used up.
        Blocks: until experts are there. Raises: StorageError if one cannot be read.
        """
        is_recorded = self._on_route is not None
        keeps_inputs = context.on_inputs is not None or (is_recorded and len(hidden) <= MAX_TOKENS)
        work = self._decoder.begin(
            hidden,
            context.positions,
            context.kv.layers,
            context.attention,
            context.all_states(),
            context.layer_inputs,
            keeps_choices=is_recorded or self.on_choices is not None,
            keeps_inputs=keeps_inputs,
        )
        if layer_times is not None:
            work.tell_times(layer_times.begin(len(hidden)))
        if self._cached is None:
            work.run()
        else:
            self._cached.run(work)
        if self._on_route is not None and work.topk_ids is not None:
            inputs = None if work.normed is None or not keeps_inputs else work.normed[self._decoder.routed]
            for number, topk_ids in enumerate(work.topk_ids):
                self._on_route(topk_ids, None if inputs is None else inputs[number])
        if self.on_choices is not None and work.topk_ids is not None:
            self.on_choices(work.topk_ids)
        if context.on_inputs is not None and work.normed is not None:
            context.on_inputs(work.normed, work.hidden)
        return work


class _CachedLayers:
    """Runs passes some of whose experts may have to be loaded first."""

    def __init__(self, decoder: PackedDecoder, routed: Sequence[DecoderLayer]) -> None:
        """Take the layers, and the layers with routers."""
        self._decoder = decoder
        self._routed = routed
        self._pool = cast("CachedExperts", cast(MoE, routed[0].mlp).weights).pool

    def first(self, decoder: PackedDecoder) -> _CachedLayers | None:
        """Return the first layers of the decoder; None if none of them has a router."""
        routed = self._routed[: len(decoder.routed)]
        return _CachedLayers(decoder, routed) if routed else None

    def run(self, work: PackedPass) -> None:
        """Run all layers."""
        num_layers = len(self._decoder.layers)
        layer = num_routed = 0  # of these, those with routers
        while layer < num_layers:
            first, layer = num_routed, self._run_on(work, layer, num_routed)
            num_routed = self._num_routed_before(layer)
            if num_routed > first and self._pool.prefetch is not None:
                self._pool.prefetch.see_hits(first, work.choices(first, num_routed))
            if layer < num_layers:
                work.add_experts(self._routed[num_routed].add_chosen, num_routed)
                layer, num_routed = layer + 1, num_routed + 1
                if layer == num_layers:
                    work.run(layer)  # for what follows the last layer

    def _run_on(self, work: PackedPass, layer: int, num_routed: int) -> int:
        """Run layers as long as all experts are there; return the first that lacks some."""
        cache, prefetch = self._pool.cache, self._pool.prefetch
        has_absent = cache.kernel_reads.begin()
        end = num_routed
        try:
            expected = prefetch.expected(work.num_tokens) if has_absent and prefetch is not None else NOTHING
            if has_absent and expected.predicted is None:
                self._pool.lend_slots(len(self._routed) - num_routed, work.num_choices)
            stopped = work.run(layer, expected, self._pool.fetcher_handle)
            end = self._num_routed_before(stopped)
        finally:
            cache.kernel_reads.end(num_routed, on_host(work.choices(num_routed, end)))
        return stopped

    def _num_routed_before(self, layer: int) -> int:
        return bisect_left(self._decoder.routed, layer)
