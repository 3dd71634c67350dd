"""The pipelines by name, and the properties that a cost model or an executor needs before it runs one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, Protocol

import msgspec

from moeflow.core.extensions import ExtensibleTable
from moeflow.pipeline.cgopipe import cgopipe, fastdecode
from moeflow.pipeline.cgopipe_sharing import cgopipe_sharing
from moeflow.pipeline.flexgen import flexgen, flexgen_host_attention
from moeflow.pipeline.sequential import sequential
from moeflow.pipeline.task import Task
from moeflow.pipeline.zero_inference import zero_inference


class MakeTasks(Protocol):
    """A pipeline's generator."""

    def __call__(
        self, num_layers: int, num_micro_batches: int, /, *, is_warm: bool = False, wraps: bool = False
    ) -> Iterator[Task]:
        """Yield a decoding step."""


class Pipeline(msgspec.Struct, frozen=True):
    """A pipeline that streams weights from the host.

    A new one is a file and a row below, or an entry point of another package.
    """

    name: str
    summary: str
    make_tasks: MakeTasks
    is_paged: bool = False  # weights in as many pages as micro-batches, not whole layers
    attends_on_host: bool = True
    has_kv_on_host: bool = True
    make_sharing_tasks: MakeTasks | None = None  # where the host computes some of the experts, if it may


_OWN: Final = {
    one.name: one
    for one in (
        Pipeline(
            "cgopipe",
            "the host attends; weights go to the device in pages",
            cgopipe,
            is_paged=True,
            make_sharing_tasks=cgopipe_sharing,
        ),
        Pipeline("fastdecode", "the host attends; weights go to the device layer by layer", fastdecode),
        Pipeline("flexgen-cpu-attention", "the host attends while the device waits", flexgen_host_attention),
        Pipeline("flexgen", "the device attends; keys, values and weights go there", flexgen, attends_on_host=False),
        Pipeline(
            "zero-inference",
            "the device attends; weights go there layer by layer",
            zero_inference,
            attends_on_host=False,
            has_kv_on_host=False,
        ),
    )
}
PIPELINES: Final = ExtensibleTable("moeflow.pipelines", _OWN, Pipeline)
SEQUENTIAL: Final = Pipeline("sequential", "one task after another", sequential)
PROMPTS: Final = Pipeline(
    "prompts",
    "zero-inference over prompts whose keys and values go to the host",
    partial(zero_inference, stores_kv=True),
    attends_on_host=False,
)
# All pipelines that an engine can run:
OFFLOADING: Final = ExtensibleTable("moeflow.pipelines", {SEQUENTIAL.name: SEQUENTIAL, **_OWN}, Pipeline)
