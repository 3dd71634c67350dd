"""The loop of every rank except the first: load its part of the model, and compute the passes it receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import islice

import msgspec

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig
from moeflow.engine.compute_setup import set_up
from moeflow.engine.forward import make_forward, make_kv_storage
from moeflow.engine.pass_tracing import PassTracing
from moeflow.engine.ranks.rank_spans import SpansAsked, gather_recordings
from moeflow.engine.runner_loading import make_allocator, make_upkeep, served_model, weight_memory
from moeflow.models.importance import known_importance
from moeflow.models.loading import load_model
from moeflow.models.pass_input import PassInput
from moeflow.parallel.group import OverlappingGroup
from moeflow.pipeline.runtime.trace import Trace


def compute_passes(
    config: EngineConfig,
    group: OverlappingGroup,
    messages: Iterable[bytes],
    on_loaded: Callable[[], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Load the model, report it, and compute a pass for each message; `progress` is that of `load_model`.

    Raises: as loading, and as `progress`; GroupError.
    """
    set_up(config)
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        upkeep = make_upkeep(checkpoint, config, group)
        allocator = make_allocator(config, weight_memory(checkpoint, config, progress=progress), ranks=upkeep)
        importance = known_importance(config.importance_file)
        model = load_model(
            checkpoint, allocator, num_threads=config.num_threads, progress=progress, importance=importance
        )
    kv = make_kv_storage(config, model.config, group.rank)
    trace = Trace(is_on=False)
    served = served_model(model, config, upkeep, trace)
    tracing = PassTracing(trace, served, model.config, upkeep.group.clock)
    forward = make_forward(config, served, kv, upkeep)
    on_loaded()
    decoder = msgspec.msgpack.Decoder(PassInput | SpansAsked)
    with closing(served):
        for message in messages:
            given = decoder.decode(message)
            if isinstance(given, SpansAsked):
                tracing.switch(is_on=given.num_passes > 0)
                if given.num_passes:
                    gather_recordings(group, tracing.recording(given.num_passes))
                continue
            kv.move(given.kv_moves)
            with tracing.part_of_pass(len(given.token_ids)), upkeep.computing():
                for hidden in islice(forward.run(given), len(given.logit_rows)):
                    if model.shares_head:
                        served.logits(hidden)
