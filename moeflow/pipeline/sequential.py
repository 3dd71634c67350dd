"""One task after another: the reference whose results every other pipeline must equal."""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.task import Task, TaskMaker


def sequential(
    num_layers: int, num_micro_batches: int, /, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a pass: for each layer its weights, then the three stages of one micro-batch after another.

    It loads nothing ahead, so weights of the previous or the next pass do not matter.
    """
    make, last = TaskMaker(), None
    for layer in range(num_layers):
        last = make("load_weights", layer, after=[last])
        yield last
        for micro_batch in range(num_micro_batches):
            for op in ("pre_attention", "attention", "post_attention"):
                last = make(op, layer, micro_batch, after=[last])
                yield last
