"""FlexGen's decoding loop as its source has it (`generation_loop_overlap_multi_batch` in `flex_moe.py`).

The schedules of MoE-Lightning's figure 6 are what it could do. Its source differs in three points:

- A layer's attention and its experts are computed in separate rounds of all micro-batches. Each micro-batch of a round
  ends with `torch.cuda.synchronize`, so nothing reaches beyond it.
- All weights of a layer are loaded within one micro-batch of a round, and keys and values beside attention alone.
- Neither is pinned. The thread that starts kernels first copies them to pinned memory (`general_copy`).
"""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.offloading import OP_LANES, attention_on_host
from moeflow.pipeline.task import Task, TaskMaker


def flexgen_loop(
    num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a decoding step where the device attends; both flags count as set."""
    del is_warm, wraps
    make, ended = TaskMaker(OP_LANES), list[Task]()
    for layer in range(num_layers):
        for micro_batch in range(num_micro_batches):
            copied = list(_load_weights(make, layer, ended)) if micro_batch == 0 else []
            if micro_batch + 1 < num_micro_batches:
                copied += _load_kv(make, layer, micro_batch + 1, ended)
            # The kernels start after the copies of the thread that starts them, which are every other task.
            projected = make("pre_attention", layer, micro_batch, after=[*ended, *copied[::2]])
            attended = make("device_attention", layer, micro_batch, after=[projected])
            ended = [*copied, projected, attended, make("store_kv", layer, micro_batch, after=[projected])]
            yield from ended
        for micro_batch in range(num_micro_batches):
            is_last = micro_batch + 1 == num_micro_batches
            copied = list(_load_kv(make, (layer + 1) % num_layers, 0, ended)) if is_last else []
            experts = make("post_attention", layer, micro_batch, after=[*ended, *copied[::2]])
            ended = [*copied, experts]
            yield from ended


def flexgen_host_loop(
    num_layers: int, num_micro_batches: int, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a decoding step where the host attends; both flags count as set."""
    del is_warm, wraps
    make, ended = TaskMaker(OP_LANES), list[Task]()
    for layer in range(num_layers):
        for micro_batch in range(num_micro_batches):
            copied = list(_load_weights(make, layer, ended)) if micro_batch == 0 else []
            attended = attention_on_host(make, layer, micro_batch, [*ended, *copied[::2]])
            ended = [*copied, *attended, make("load_hidden", layer, micro_batch, after=[attended[-1]])]
            yield from ended
        for micro_batch in range(num_micro_batches):
            ended = [make("post_attention", layer, micro_batch, after=ended)]
            yield from ended


def _load_weights(make: TaskMaker, layer: int, ended: list[Task]) -> Iterator[Task]:
    copied = make("weights_to_pinned", layer, after=ended)
    yield from (copied, make("weights_to_device", layer, after=[copied]))


def _load_kv(make: TaskMaker, layer: int, micro_batch: int, ended: list[Task]) -> Iterator[Task]:
    copied = make("kv_to_pinned", layer, micro_batch, after=ended)
    yield from (copied, make("load_kv", layer, micro_batch, after=[copied]))
