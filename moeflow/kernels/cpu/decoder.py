"""The layers of a decoder by the CPU extension in one call, so that a pass of one token is kernels and little else.

Where only some experts are in memory, the call returns at a layer that needs others, and is made again for the rest.
The results are those of the layers' stages one after another, to the bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from moeflow.kernels.arrays import Array, address, floats_like, ids_like, is_contiguous, is_int64
from moeflow.kernels.attention.attention_metadata import AttentionMetadata
from moeflow.kernels.attention.kv_blocks import KVBlocks
from moeflow.kernels.cpu import extension
from moeflow.kernels.cpu.arguments import describe, floats
from moeflow.kernels.cpu.packed_layer import PackedAttention, PackedLayer
from moeflow.kernels.cpu.rotary import bind_rotary
from moeflow.kernels.cpu.stages import bind_norm
from moeflow.kernels.norm import NormWeights
from moeflow.kernels.recurrent.state_sequences import LayerStates, PassStates
from moeflow.kernels.rotary import Rotary

if extension.is_available():
    import moeflow.kernels._cpu as _cpu

# (input [T, H], topk_ids [T, K], topk_weights [T, K], hidden states so far [T, H]) -> those after the layer [T, H]
Experts = Callable[[Array, Array, Array, Array], Array]


class Expected(msgspec.Struct, frozen=True):
    """Which experts layers with routers will probably need: a pass stops where one is absent.

    `routers_ahead`: the experts that the router this many layers ahead would choose now, counting layers with routers.
    At the first one, those of all routers up to there. 0: none. `predicted`: of the next such layer those that are not
    0, [layers with routers, E] uint8.
    """

    routers_ahead: int = 0
    predicted: Array | None = None


NOTHING: Final = Expected()
TIMES_PER_LAYER: Final = 4


class _Memory(NamedTuple):
    """Where keys, values and states are, and how the extension has it."""

    blocks: Sequence[KVBlocks]
    states: Sequence[LayerStates] | None
    handle: Any


class PackedDecoder:
    """The layers of one model. Those with routers have as many experts each, and choose as many."""

    def __init__(
        self, layers: Sequence[PackedLayer], rotary: Sequence[Rotary] = (), out_norm: NormWeights | None = None
    ) -> None:
        """`rotary` are the kinds of rotary positions; layers refer to one by its index. `out_norm` follows the last
        one."""
        # Whose memory the handles look at.
        self.layers, self.rotary, self.out_norm = tuple(layers), tuple(rotary), out_norm
        self.routed = [number for number, layer in enumerate(layers) if layer.stage.router is not None]
        self.has_slots = any(layer.stage.slots is not None for layer in layers)
        for number, layer in enumerate(layers):
            if layer.attention is not None and layer.attention.layers_back > number:
                raise ValueError(f"layer {number} attends to a missing layer")
        self._attentions = [layer.attention for layer in layers if layer.attention is not None]
        self._num_caches = sum(not attention.layers_back for attention in self._attentions)
        self._num_inputs = sum(layer.layer_input is not None for layer in layers)
        self._check_rotary()
        self._handles = [layer.bind() for layer in layers]
        self._model = _cpu.DecoderModel(
            layers=self._handles,
            rotary=[bind_rotary(*kind) for kind in rotary],
            out_norm=None if out_norm is None else bind_norm(out_norm, layers[0].hidden),
        )
        self._memory: _Memory | None = None  # of the last pass, which is most often that of the next
        stages = [layers[number].stage for number in self.routed]
        self._top_k = stages[0].choose.top_k if stages else 0
        routers = {(stage.choose.top_k, stage.slots is None, stage.num_experts) for stage in stages}
        if len(routers) > 1:
            raise ValueError(f"layers with routers of different kinds cannot run in one pass: {routers}")

    def begin(
        self,
        hidden: Array,
        positions: Array,
        blocks: Sequence[KVBlocks],
        metadata: AttentionMetadata,
        states: PassStates | None = None,
        layer_inputs: Array | None = None,
        *,
        keeps_choices: bool = False,
        keeps_inputs: bool = False,
    ) -> PackedPass:
        """Return a pass that is yet to be run; K and V of every token will go to `blocks`, states to `states`.

        It keeps what routers choose, and what the experts of all layers, or their dense networks, get, if asked to.

        Shapes: hidden [T, H] float32, updated in place; positions [T] int64; blocks: one per layer with keys and
        values; layer_inputs [T, layers or more, P] float32, if layers have such inputs.
        """
        hidden_size = self.layers[0].hidden
        num_tokens = hidden.shape[0]
        floats(hidden, num_tokens, hidden_size)
        if positions.shape != (num_tokens,) or not is_int64(positions) or not is_contiguous(positions):
            raise ValueError(f"{num_tokens} tokens have positions of int64, not {describe(positions)}")
        memory = self._memory_of(blocks, states)
        inputs_stride = self._check_inputs(layer_inputs, num_tokens)
        keeps_choices |= self.has_slots
        topk_ids = ids_like(hidden, len(self.routed), num_tokens, self._top_k) if keeps_choices else None
        num_kept = len(self.layers) if keeps_inputs else int(self.has_slots)
        normed = floats_like(hidden, num_kept, num_tokens, hidden_size) if num_kept else None
        topk_weights = floats_like(hidden, num_tokens, self._top_k) if self.has_slots else None
        out = None if self.out_norm is None else floats_like(hidden, num_tokens, hidden_size)
        handle = _cpu.DecoderPass(
            model=self._model,
            memory=memory.handle,
            num_tokens=num_tokens,
            positions=address(positions),
            slots=address(metadata.slots),
            num_sequences=len(metadata.spans),
            sequences=metadata.table.buffer_info()[0],
            num_states=0 if states is None else len(states.sequences),
            state_sequences=0 if states is None else address(states.sequences.table),
            tree_masks=address(metadata.tree_masks),
            topk_ids=address(topk_ids),
            normed=address(normed),
            topk_weights=address(topk_weights),
            keeps_inputs=keeps_inputs,
            layer_inputs=address(layer_inputs),
            inputs_stride=inputs_stride,
            out=address(out),
        )
        looked_at = (self, memory, positions, metadata, states, layer_inputs)
        return PackedPass(hidden, topk_ids, normed, topk_weights, self.routed, len(self.layers), handle, looked_at, out)

    def _memory_of(self, blocks: Sequence[KVBlocks], states: PassStates | None) -> _Memory:
        """Return where keys, values and states are, for the extension. Raises: ValueError if it does not fit."""
        layers = None if states is None else states.layers
        memory = self._memory
        if memory is None or memory.blocks is not blocks or memory.states is not layers:
            self._check_memory(blocks, layers or ())
            remaining = iter(layers or ())
            memory = self._memory = _Memory(
                blocks,
                layers,
                _cpu.DecoderMemory(
                    caches=self._caches(blocks),
                    states=[address(next(remaining).slots) if it.attention is None else 0 for it in self.layers],
                    slot_floats=layers[0].slots.shape[1] if layers else 0,
                ),
            )
        return memory

    def _caches(self, blocks: Sequence[KVBlocks]) -> list[object]:
        """Return the cache that each layer attends to; None: it does not."""
        own, caches = iter(blocks), list[object]()
        for layer in self.layers:
            attention = layer.attention
            if attention is None:
                caches.append(None)
            else:
                back = attention.layers_back
                caches.append(caches[-back] if back else next(own).handle)
        return caches

    def _check_rotary(self) -> None:
        """Raise ValueError if a layer rotates by a missing kind, or more dimensions than heads have."""
        for number, head_dim in {(it.rotary, it.heads.head_dim) for it in self._attentions if it.rotary is not None}:
            if number >= len(self.rotary):
                raise ValueError(f"layers rotate by kind {number} of positions; there are {len(self.rotary)}")
            num_pairs = self.rotary[number].frequencies.shape[0]
            if 2 * num_pairs > head_dim:
                raise ValueError(f"{num_pairs} pairs of dimensions are not in heads of {head_dim}")

    def _check_inputs(self, layer_inputs: Array | None, num_tokens: int) -> int:
        """Return how many values a token's inputs are. Raises: ValueError unless they are what layers need."""
        if not self._num_inputs:
            return 0
        if layer_inputs is None or layer_inputs.shape[1] < self._num_inputs:
            raise ValueError(f"{self._num_inputs} layers get inputs of their own")
        num_layers, size = layer_inputs.shape[1:]
        floats(layer_inputs, num_tokens, num_layers, size)
        if any(layer.layer_input is None or layer.layer_input.gate.rows != size for layer in self.layers):
            raise ValueError(f"inputs of {size} values are not for each layer")
        return int(num_layers * size)

    def _check_memory(self, blocks: Sequence[KVBlocks], memory: Sequence[LayerStates]) -> None:
        """Raise ValueError unless each layer has its keys and values or states there."""
        mixers = [layer.mixer for layer in self.layers if not isinstance(layer.mixer, PackedAttention)]
        if (len(blocks), len(memory)) != (self._num_caches, len(mixers)):
            raise ValueError(
                f"{self._num_caches} layers that keep keys and values and {len(mixers)} with states need as many "
                f"KV caches and memories of states, not {len(blocks)} and {len(memory)}"
            )
        for mixer, layer in zip(mixers, memory, strict=True):
            floats(layer.slots, len(layer.slots), mixer.state_values)


class PackedPass(msgspec.Struct):
    """One pass: its inputs, and the results of its layers so far."""

    hidden: Array  # [T, H]; where the pass has stopped: what the experts' sum is to be added to
    topk_ids: Array | None  # [layers with routers, T, K] int64, what routers chose as far as the pass has come
    # What goes into experts: [1, T, H], where the pass has stopped, or [layers, T, H] if each layer's is kept.
    normed: Array | None
    topk_weights: Array | None  # [T, K]; likewise
    _routed: Sequence[int]  # the layers with routers
    _num_layers: int
    _handle: Any
    _memory: tuple[object, ...]  # objects used by the handle, other than these tensors
    out: Array | None  # [T, H], the normalized output of the last layer, once complete; None: no norm follows it

    times: array[int] | None = None  # see `tell_times`

    def tell_times(self, times: array[int]) -> None:
        """Have the pass write when it comes to the parts of layers, in nanoseconds of `time.perf_counter_ns`.

        The parts are those of `LayerTimes` in csrc/ops/ops.h. Shapes: times [layers * TIMES_PER_LAYER] of 64 bits.
        """
        num_layers = self._num_layers
        if (times.typecode, len(times)) != ("q", num_layers * TIMES_PER_LAYER):
            raise ValueError(f"{num_layers} layers write {TIMES_PER_LAYER} times of 64 bits each")
        self.times = times

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.hidden.shape[0]

    @property
    def num_choices(self) -> int:
        """Number of experts that a layer's router chooses, summed over tokens."""
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

        A `SlotFetcher`, given by its handle, fetches missing experts. It prefetches the probable choices of later
        routers into the slots lent to it. Experts must not be moved meanwhile.
        """
        stopped: int = self._handle.run(
            first_layer=first_layer,
            hidden=address(self.hidden),
            routers_ahead=expected.routers_ahead,
            predicted=address(expected.predicted),
            fetcher=fetcher,
            times=0 if self.times is None else self.times.buffer_info()[0],
        )
        return stopped
