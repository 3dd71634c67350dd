"""CGOPipe where the host computes some of each layer's experts, so that the link streams fewer of them.

The router's choice and its input go to the host. The sum over the host's experts comes back, and the device adds the
others to it. All micro-batches are routed before the first of them needs the layer's weights: the host attends and
computes its experts while these arrive. Only experts wait for pages, as all other weights stay on the device.
Source: MoE-Lightning 4.1; the host's share of experts is ours.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.offloading import OP_LANES, LayerWeights, attention_on_host
from moeflow.pipeline.task import Task, TaskMaker


def cgopipe_sharing(
    num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a pass. For `is_warm` and `wraps` see `LayerWeights`."""
    make, done = TaskMaker(OP_LANES), None
    weights = LayerWeights(make, num_layers, num_micro_batches, is_warm=is_warm, wraps=wraps)
    attended: dict[int, Task] = {}  # by micro-batch
    hosted: dict[int, Task] = {}  # by micro-batch: the host's sums are on the device

    def attend(layer: int, micro_batch: int, after: Task | None) -> Iterator[Task]:
        tasks = attention_on_host(make, layer, micro_batch, [after])
        attended[micro_batch] = tasks[-1]
        yield from tasks

    def compute_on_host(layer: int, micro_batch: int) -> Iterator[Task]:
        hidden = make("load_hidden", layer, micro_batch, after=[attended[micro_batch]])
        routed = make("route", layer, micro_batch, after=[hidden])
        offloaded = make("offload_routed", layer, micro_batch, after=[routed])
        computed = make("host_experts", layer, micro_batch, after=[offloaded])
        hosted[micro_batch] = make("load_sums", layer, micro_batch, after=[computed])
        yield from (hidden, routed, offloaded, computed, hosted[micro_batch])

    yield from weights.load(0)
    for micro_batch in range(num_micro_batches):
        yield from attend(0, micro_batch, None)
    for layer in range(num_layers):
        yield from weights.load(layer + 1)
        for micro_batch in range(num_micro_batches):
            yield from compute_on_host(layer, micro_batch)
        for micro_batch in range(num_micro_batches):
            done = make("experts", layer, micro_batch, after=[hosted[micro_batch], weights.last_page(layer), done])
            weights.used_up(layer, done)
            yield done
            if layer + 1 < num_layers:
                yield from attend(layer + 1, micro_batch, done)
