"""One thing after another: the plain twin of every other pipeline, whose results theirs must equal."""

from __future__ import annotations

from collections.abc import Iterator

from moeflow.pipeline.task import Task, TaskMaker


def sequential(
    num_layers: int, num_micro_batches: int, /, *, is_warm: bool = False, wraps: bool = False
) -> Iterator[Task]:
    """Yield a pass: for each layer its weights, then the three stages of each micro-batch in turn.

    Nothing is loaded ahead, so it does not matter whether a pass finds weights of the one before or leaves some.
    """
    make, last = TaskMaker(), None
    for layer in range(num_layers):
        last = make("load_weights", layer, after=[last])
        yield last
        for micro_batch in range(num_micro_batches):
            for op in ("pre_attention", "attention", "post_attention"):
                last = make(op, layer, micro_batch, after=[last])
                yield last
