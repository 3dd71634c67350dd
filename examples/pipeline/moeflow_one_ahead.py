"""The host attends one micro-batch ahead of the device, which takes weights layer by layer."""

from collections.abc import Iterator

from moeflow.pipeline.catalog import Pipeline
from moeflow.pipeline.offloading import OP_LANES, LayerWeights, attention_on_host
from moeflow.pipeline.task import Task, TaskMaker


def one_ahead(
    num_layers: int, num_micro_batches: int, /, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a decoding step: each micro-batch's attention before the one before it is through its experts."""
    make = TaskMaker(OP_LANES)
    weights = LayerWeights(make, num_layers, is_warm=is_warm, wraps=wraps)
    places = [(layer, micro_batch) for layer in range(num_layers) for micro_batch in range(num_micro_batches)]
    attended: list[Task] = []
    ended: list[Task] = []

    def attend(number: int) -> Iterator[Task]:
        layer, micro_batch = places[number]
        needs = [weights.first_page(layer), *ended[max(number - num_micro_batches, 0) : number - num_micro_batches + 1]]
        tasks = attention_on_host(make, layer, micro_batch, needs)
        attended.append(tasks[-1])
        yield from tasks

    yield from weights.load(0)
    for number, (layer, micro_batch) in enumerate(places):
        if micro_batch == 0:
            yield from weights.load(layer + 1)
        while len(attended) <= min(number + (num_micro_batches > 1), len(places) - 1):
            yield from attend(len(attended))
        hidden = make("load_hidden", layer, micro_batch, after=[attended[number]])
        ended.append(make("post_attention", layer, micro_batch, after=[hidden, weights.last_page(layer), *ended[-1:]]))
        weights.used_up(layer, ended[-1])
        yield from (hidden, ended[-1])


ONE_AHEAD = Pipeline(
    "one-ahead",
    "the host attends one micro-batch ahead; weights go to the device layer by layer",
    one_ahead,
    is_paged=False,
    attends_on_host=True,
    has_kv_on_host=True,
)
