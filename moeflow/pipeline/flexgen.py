"""FlexGen's two schedules: a layer's weights in one piece, one micro-batch after another.

S3 attends on the host while the device waits. S4 attends on the device, and fetches the keys and values of the next
micro-batch while it computes this one. The device has space for two. Source: MoE-Lightning figure 6.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.offloading import OP_LANES, LayerWeights, attention_on_host, store_kv
from moeflow.pipeline.task import Task, TaskMaker


def flexgen_host_attention(
    num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a decoding step of S3. For `is_warm` and `wraps` see `LayerWeights`."""
    make, last = TaskMaker(OP_LANES), None
    weights = LayerWeights(make, num_layers, is_warm=is_warm, wraps=wraps)
    yield from weights.load(0)
    for layer in range(num_layers):
        yield from weights.load(layer + 1)
        for micro_batch in range(num_micro_batches):
            tasks = attention_on_host(make, layer, micro_batch, [weights.last_page(layer), last])
            hidden = make("load_hidden", layer, micro_batch, after=[tasks[-1]])
            last = make("post_attention", layer, micro_batch, after=[hidden])
            yield from (*tasks, hidden, last)
            weights.used_up(layer, last)


def flexgen(num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False) -> Iterator[Task]:
    """Yield a decoding step of S4. For `is_warm` and `wraps` see `LayerWeights`."""
    make, last = TaskMaker(OP_LANES), None
    weights = LayerWeights(make, num_layers, is_warm=is_warm, wraps=wraps)
    places = [(layer, micro_batch) for layer in range(num_layers) for micro_batch in range(num_micro_batches)]
    loads: list[Task] = []
    attended: list[Task] = []

    def load_kv(number: int) -> Iterator[Task]:
        if number < len(places):
            freed, sent = (attended[number - 2], loads[number - 2]) if number >= 2 else (None, None)
            gathered = make("kv_to_pinned", *places[number], after=[sent])
            loads.append(make("load_kv", *places[number], after=[gathered, freed]))
            yield from (gathered, loads[-1])

    yield from weights.load(0)
    yield from load_kv(0)
    for number, (layer, micro_batch) in enumerate(places):
        if micro_batch == 0:
            yield from weights.load(layer + 1)
        yield from load_kv(number + 1)
        projected = make("pre_attention", layer, micro_batch, after=[weights.last_page(layer), last])
        attended.append(make("device_attention", layer, micro_batch, after=[loads[number], projected]))
        yield from (projected, attended[-1])
        yield from store_kv(make, layer, micro_batch, projected)
        last = make("post_attention", layer, micro_batch, after=[attended[-1]])
        yield last
        weights.used_up(layer, last)
