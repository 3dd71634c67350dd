"""From a configuration to speculators: by name, or as additional draft models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.weight_memory import FreshMemory
from moeflow.core.engine_config import DraftModelConfig, EngineConfig
from moeflow.engine.model_runner import ModelRunner, Runner
from moeflow.engine.runner_loading import make_allocator
from moeflow.kernels.on_demand import on_demand
from moeflow.kv.block_tables import BlockTables
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.loading import load_causal_lm
from moeflow.speculation.governor import Governor
from moeflow.speculation.names import short_names
from moeflow.speculation.registry import SPECULATORS
from moeflow.speculation.speculation import Speculation
from moeflow.speculation.speculator import Speculator

with on_demand(__name__):
    from moeflow.checkpoint import draft_vocabulary
    from moeflow.engine.speculators import draft_model, routing_advice


def load_speculators(config: EngineConfig, runner: Runner) -> list[Speculator]:
    """Return the speculators of a loaded model. Raises: CheckpointError, CapacityError."""
    drafts = {draft.name: draft for draft in config.draft_models}
    called = short_names(config.speculators)
    return [
        _draft_model(config, drafts[name], called[name], runner) if name in drafts else SPECULATORS[name]()
        for name in config.speculators
    ]


def speculation_of(speculators: Sequence[Speculator], runner: Runner, governor: Governor | None = None) -> Speculation:
    """Return the drafting of a loaded model's speculators, with its governor."""
    store = runner.experts if isinstance(runner, ModelRunner) else None
    absent_of = None if store is None else store.cache.absent_of
    return Speculation(speculators, absent_of=absent_of, governor=governor or Governor())


def _draft_model(config: EngineConfig, draft: DraftModelConfig, name: str, runner: Runner) -> draft_model.DraftModel:
    if draft.is_early_exit:
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner.model, CausalLM), "drafts are for models that the CPU computes"
        model = runner.model.first(draft.num_layers)
        vocabulary: Sequence[int] = range(runner.info.vocab_size)
    else:
        model, vocabulary = _load(config, draft, runner.info.vocab_size)
    kept = None if config.experts is None else config.scheduler.num_kept_blocks
    tables = BlockTables(
        num_blocks=draft.num_blocks,
        block_size=config.scheduler.block_size,
        prefix_caching=config.scheduler.prefix_caching,
        num_kept=kept,
    )
    kv = KVStorage(
        layers=model.config.kv_layers,
        num_blocks=draft.num_blocks,
        block_size=config.scheduler.block_size,
        num_kv_heads=model.config.attention.num_kv_heads,
        head_dim=model.config.attention.head_dim,
        latent_dim=model.config.attention.latent_dim,
        other_heads=model.config.attention.other_heads,
        dtype=draft.kv_dtype,
        device="cpu",
        gives_back=config.experts is not None,
    )
    return draft_model.DraftModel(
        name,
        model,
        kv,
        tables,
        vocabulary=vocabulary,
        chunk_tokens=draft.chunk_tokens,
        advice=_advice(runner, model),
    )


def _advice(runner: Runner, draft: CausalLM) -> draft_model.Advice | None:
    """Return the receiver of routing advice; None: all are in memory, or the models are not alike."""
    if not isinstance(runner, ModelRunner) or runner.experts is None or not runner.experts.prefetch.sources:
        return None
    model = runner.model
    if not isinstance(model, CausalLM) or not routing_advice.RoutingAdvice.fits(model, draft):
        return None
    return draft_model.Advice(routing_advice.RoutingAdvice(model), runner.experts.prefetch)


def _load(config: EngineConfig, draft: DraftModelConfig, vocab_size: int) -> tuple[CausalLM, Sequence[int]]:
    """Return a model and its vocabulary, within the engine's `vocab_size`."""
    own = dataclasses.replace(
        config,
        dtype="float32" if config.cpu_isa else draft.weight_format,
        weight_format=draft.weight_format,
        embedding_format=draft.embedding_format,
        router_format=draft.router_format,
        is_wide=False,
    )
    with closing(open_checkpoint(draft.model_path)) as checkpoint:
        model = load_causal_lm(checkpoint, make_allocator(own, FreshMemory()), num_threads=config.num_threads)
    named = draft_vocabulary.read_draft_vocabulary(Path(draft.model_path), model.config.vocab_size)
    if named is None:
        return model, range(min(vocab_size, model.config.vocab_size))
    vocabulary = [token_id for token_id in named if token_id < vocab_size]
    return model.drafting(vocabulary), vocabulary
