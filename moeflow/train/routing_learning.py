"""Learns the profile of a model's routers: runs a text through the model once and replays the choices.

Prefill makes the same choices as decoding, so a few passes suffice for thousands of tokens.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_messages import Submission
from moeflow.core.errors import CapacityError, EngineError
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.engine import Engine
from moeflow.planner.costs.routing_profile import RoutingProfile, load_profile, save_profile
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.known_routing import popularity_file, routing_file
from moeflow.planner.resolve import resolve
from moeflow.planner.simulator.routing_study import ROUND_TOKENS, study_routing
from moeflow.settings.settings import Settings
from moeflow.text.tokenizer import Tokenizer
from moeflow.train.calibration_text import calibration_text
from moeflow.train.phases import OnDone
from moeflow.workload.routing_trace import ExpertIds, RoutingTrace, read_routing_trace

NUM_TOKENS: Final = 4096
SEQUENCE_TOKENS: Final = ROUND_TOKENS  # the length of replayed sequences
_MEMORY_SHARE: Final = 0.8  # of available memory, for a model larger than it


def ensure_profile(settings: Settings, on_done: OnDone = lambda *_: None) -> RoutingProfile:
    """Return the profile of a model's routers from the cache, or learn and store it.

    Blocks: for loading, a few passes over thousands of tokens, and seconds of replay.
    Raises: CheckpointError, also if there is no tokenizer; as `Engine.load`; EngineError.
    """
    assert settings.model is not None, "a model is named"
    with closing(open_checkpoint(settings.model)) as checkpoint:
        file, choices = (find(checkpoint, settings.cache_dir) for find in (routing_file, popularity_file))
    known = load_profile(file)
    if known is None:
        known = _learn(settings, choices, on_done)
        save_profile(known, file)
    return known


def learning_text(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens to learn from: the first half of each text of the package."""
    texts = calibration_text(tokenizer.encode)
    return [token_id for text in texts.fitting for token_id in text[: len(text) // 2]]


def other_text(tokenizer: Tokenizer) -> list[int]:
    """Return the other tokens of the same texts."""
    texts = calibration_text(tokenizer.encode)
    halves = (text[len(text) // 2 :] + rest for text, rest in zip(texts.fitting, texts.held_out, strict=True))
    return [token_id for half in halves for token_id in half]


def _learn(settings: Settings, kept: Path, on_done: OnDone) -> RoutingProfile:
    """Learn a profile, and keep the choices that it was learnt from."""
    tokens = learning_text(Tokenizer.load(str(settings.model)))[:NUM_TOKENS]
    with tempfile.TemporaryDirectory(prefix="moeflow-") as folder:
        file = Path(folder) / "routing.moe"
        _record(_to_learn(settings, file), tokens, lambda done, total: on_done(done, 2 * total))
        trace = read_routing_trace(file)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, new := kept.with_suffix(f".{os.getpid()}.tmp"))
        new.replace(kept)
    return study_routing(_in_order(trace), trace.header, lambda done, total: on_done(total + done, 2 * total))


def _to_learn(settings: Settings, file: Path) -> Settings:
    """Return settings for the same weights on the CPU, without limits of a workload."""
    return dataclasses.replace(
        settings,
        device="cpu",
        record_routing=file,
        prefix_caching=False,
        max_model_len=None,
        max_num_seqs=None,
        max_num_batched_tokens=None,
        kv_cache_bytes=None,
    )


def _in_order(trace: RoutingTrace) -> ExpertIds:
    """Return the choices for all tokens of a text: [layers, tokens, K].

    Prompts are computed in order. Their only generated tokens are in no pass.
    """
    return np.concatenate([routed.ids for routed in trace.passes], axis=1)


def _record(settings: Settings, tokens: list[int], on_done: OnDone) -> None:
    """Run a text through the model as prompts of usual length. A model larger than memory streams its experts.

    The length matters, since the choices depend on the context.
    """
    try:
        config = resolve(settings).config
    except CapacityError:
        if settings.memory_bytes is not None:
            raise
        here = host_resources()
        memory_bytes = here.process_bytes + int(here.available_bytes * _MEMORY_SHARE)  # the limit includes this process
        config = resolve(dataclasses.replace(settings, memory_bytes=memory_bytes)).config
    engine = Engine.load(config)
    try:
        length = min(SEQUENCE_TOKENS, engine.model.max_model_len - 1)
        for start in range(0, len(tokens), length):
            text = tokens[start : start + length]
            engine.submit(Submission(str(start), text, SamplingParams(max_tokens=1, temperature=0.0), seed=0))
        total = len(tokens) // config.scheduler.max_num_batched_tokens + 1
        done = 0
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise EngineError(output.error)
            done = min(done + 1, total)
            on_done(done, total)
    finally:
        engine.close()
