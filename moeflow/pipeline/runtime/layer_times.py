"""The times at which passes come to the parts of their layers, and the spans that follow from them.

Kernels write them, or layers that run one by one.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from time import perf_counter_ns
from typing import Final, NamedTuple

import msgspec

from moeflow.pipeline.runtime.trace import Label, Trace, TraceSpan

BEGUN, MIXED, ROUTED, ENDED = range(4)  # `LayerTimes` of csrc/ops/ops.h; 0: the pass did not come there
NUM_PARTS: Final = 4
ATTENTION, ROUTER, EXPERTS = "attention", "router", "experts"  # lanes


class LayerFacts(msgspec.Struct, frozen=True):
    """What spans say of one layer."""

    number: int
    attends: bool  # else it has another mixer of tokens
    has_router: bool
    network_flops: int  # of its experts or its dense network, for one token


class PassTimes(NamedTuple):
    """The times of one pass in nanoseconds, [layers, NUM_PARTS]."""

    num_tokens: int
    times: array[int]


class LayerStamp(NamedTuple):
    """Where a layer that is run by itself notes its times."""

    times: array[int]
    first: int

    def begin(self) -> None:
        """Note that the layer begins."""
        self.times[self.first + BEGUN] = perf_counter_ns()

    def mixed(self) -> None:
        """Note that attention is done, without its output projection."""
        self.times[self.first + MIXED] = perf_counter_ns()

    def end(self) -> None:
        """Note that the layer is done."""
        self.times[self.first + ENDED] = perf_counter_ns()


class LayerTimes:
    """The times of the last passes. One thread uses it."""

    def __init__(self, layers: Sequence[LayerFacts], max_passes: int) -> None:
        """`layers` are those that passes run, in order."""
        self.layers = layers
        self.passes: deque[PassTimes] = deque(maxlen=max_passes)
        self._empty = bytes(8 * NUM_PARTS * len(layers))

    def begin(self, num_tokens: int) -> array[int]:
        """Return where the times of a pass go, NUM_PARTS for each layer, all 0."""
        times = array("q", self._empty)
        self.passes.append(PassTimes(num_tokens, times))
        return times

    def stamps(self, num_tokens: int) -> list[LayerStamp]:
        """Do as `begin`, for layers that are run one by one."""
        times = self.begin(num_tokens)
        return [LayerStamp(times, first) for first in range(0, len(times), NUM_PARTS)]

    def add_to(self, trace: Trace) -> None:
        """Have the rows of attention, routers and experts show the times."""
        for lane in (ATTENTION, ROUTER, EXPERTS):
            trace.row(lane).add_source(partial(self.spans, lane))

    def since(self, start_ns: int) -> list[PassTimes]:
        """Return the times of the passes that came to a part after `start_ns`."""
        return [each for each in self.passes if max(each.times, default=0) > start_ns]

    def spans(self, lane: str) -> Iterator[TraceSpan]:
        """Yield the spans of a lane, oldest first."""
        for num_tokens, times in self.passes:
            for layer, at in zip(self.layers, count(step=NUM_PARTS)):
                begun, mixed, routed, ended = times[at : at + NUM_PARTS]
                if lane == ATTENTION:
                    span = TraceSpan(Label(_mixer(layer), layer.number), begun, mixed, False)
                elif lane == ROUTER:
                    span = TraceSpan(Label(_chooser(layer), layer.number), mixed, routed, False)
                else:
                    flops = layer.network_flops * num_tokens
                    label = Label(_network(layer, is_alone=bool(routed)), layer.number, flops=flops)
                    span = TraceSpan(label, routed or mixed, ended, False)
                if span.start_ns and span.end_ns:
                    yield span


def _mixer(layer: LayerFacts) -> str:
    return "attention" if layer.attends else "recurrent mixer"


def _chooser(layer: LayerFacts) -> str:
    return "output projection and router" if layer.has_router else "output projection"


def _network(layer: LayerFacts, *, is_alone: bool) -> str:
    name = "experts" if layer.has_router else "dense network"
    return name if is_alone else f"{_chooser(layer)}, {name}"
