"""CGOPipe and S2: attention two micro-batches ahead on the host.

CGOPipe moves weights in as many pages as there are micro-batches. Each page follows a micro-batch's hidden states on
the link that both share, as in the algorithm. So no computation waits for weights that it does not need. Source:
MoE-Lightning 4.1, algorithm 1; here layers and micro-batches count from 0.

S2 moves each layer's weights in one piece. The next layer's first hidden states wait for that piece. Source:
MoE-Lightning figure 6; FastDecode itself streams no weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.offloading import OP_LANES, LayerWeights, attention_on_host
from moeflow.pipeline.task import Task, TaskMaker


def cgopipe(num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False) -> Iterator[Task]:
    """Yield a decoding step in the order of the algorithm. For `is_warm` and `wraps` see `LayerWeights`."""
    make = TaskMaker(OP_LANES)
    weights = LayerWeights(make, num_layers, num_micro_batches, is_warm=is_warm, wraps=wraps)
    return _two_ahead(make, weights, num_layers, num_micro_batches, is_paged=True)


def fastdecode(
    num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a decoding step of S2. For `is_warm` and `wraps` see `LayerWeights`."""
    make = TaskMaker(OP_LANES)
    weights = LayerWeights(make, num_layers, is_warm=is_warm, wraps=wraps)
    return _two_ahead(make, weights, num_layers, num_micro_batches, is_paged=False)


def _two_ahead(
    make: TaskMaker, weights: LayerWeights, num_layers: int, num_micro_batches: int, *, is_paged: bool
) -> Iterator[Task]:
    ahead = min(2, num_micro_batches)
    attended: dict[int, Task] = {}  # by micro-batch: the attention that its next post-attention needs
    ended: dict[int, Task] = {}  # by micro-batch: its latest post-attention
    done = None

    def attend(layer: int, micro_batch: int, after: Task | None) -> Iterator[Task]:
        if layer < num_layers:
            needs = dict.fromkeys([weights.first_page(layer), ended.get(micro_batch), after])
            tasks = attention_on_host(make, layer, micro_batch, needs)
            attended[micro_batch] = tasks[-1]
            yield from tasks
        if is_paged:
            yield from weights.to_pinned(layer + 1, micro_batch)

    yield from weights.load(0)
    for micro_batch in range(ahead):
        yield from attend(0, micro_batch, None)
    for layer in range(num_layers):
        if not is_paged:
            yield from weights.load(layer + 1)
        for micro_batch in range(num_micro_batches):
            hidden = make("load_hidden", layer, micro_batch, after=[attended[micro_batch]])
            yield hidden
            if is_paged:
                yield from weights.to_device(layer + 1, micro_batch, behind=hidden)
            done = make("post_attention", layer, micro_batch, after=[hidden, weights.last_page(layer), done])
            ended[micro_batch] = done
            weights.used_up(layer, done)
            yield done
            layers_on, following = divmod(micro_batch + ahead, num_micro_batches)
            yield from attend(layer + layers_on, following, done)
