"""Layer by layer: keys and values stay on the device, the next layer's weights arrive in one piece while this one runs.

DeepSpeed decodes in this way (ZeRO-Inference). A prefill also moves keys and values to the host, where every other
pipeline expects them. Source: MoE-Lightning 4 and 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.offloading import OP_LANES, LayerWeights, store_kv
from moeflow.pipeline.task import Task, TaskMaker


def zero_inference(
    num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False, stores_kv: bool = False
) -> Iterator[Task]:
    """Yield a pass; `stores_kv` makes it a prefill for the others. For `is_warm` and `wraps` see `LayerWeights`."""
    make, last = TaskMaker(OP_LANES), None
    weights = LayerWeights(make, num_layers, is_warm=is_warm, wraps=wraps)
    yield from weights.load(0)
    for layer in range(num_layers):
        yield from weights.load(layer + 1)
        for micro_batch in range(num_micro_batches):
            projected = make("pre_attention", layer, micro_batch, after=[weights.last_page(layer), last])
            attended = make("device_attention", layer, micro_batch, after=[projected])
            yield from (projected, attended)
            if stores_kv:
                yield from store_kv(make, layer, micro_batch, projected)
            last = make("post_attention", layer, micro_batch, after=[attended])
            yield last
            weights.used_up(layer, last)
