"""The prefetch sources of a model: which ones its configured predictor means, and the networks that they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.core.batch import Batch
from moeflow.core.engine_config import EngineConfig
from moeflow.core.trial import Trial
from moeflow.experts.predict.predictor import RoutedModel
from moeflow.experts.predict.registry import COMBINED, NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.experts.prefetch.expert_tables import ExpertTables
from moeflow.experts.prefetch.followed_texts import Embed, FollowedTexts
from moeflow.experts.prefetch.input_source import InputSource
from moeflow.experts.prefetch.layer_source import LayerSource
from moeflow.experts.prefetch.network_source import NetworkSource
from moeflow.experts.prefetch.source import Source
from moeflow.models.expert_predictor.packed_network import for_serving
from moeflow.models.expert_predictor.saved import folders_of, is_saved, load_predictor
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.pipeline.runtime.trace import Trace
from moeflow.planner.choices.packed_files import used_packed_weights_file


def prefetch_sources(
    model: LanguageModel, checkpoint: Checkpoint, config: EngineConfig, tables: ExpertTables | None
) -> list[Source[Batch]]:
    """Return the sources for a model whose experts come from disk; `tables` are of an encoder's inputs.

    Raises: CheckpointError if the predictor has to be trained, and was not for this checkpoint.
    """
    assert config.experts is not None
    name = config.experts.predictor
    if name == NO_PREDICTOR:
        return []
    if name == WHOLE_PASS:
        return list(_whole_pass_sources(model, checkpoint, config, tables))
    folder, _ = _folders(checkpoint, config)
    has_network = name == COMBINED and isinstance(model, CausalLM) and is_saved(folder)
    routers = [block for _, block in model.moe_blocks()]
    num_layers, num_experts = model.config.num_moe_layers, model.config.routing.num_experts
    predictor = PREDICTORS[name](RoutedModel(num_layers, num_experts, routers, has_network=has_network))
    network = _texts(folder, model, checkpoint).named_for if has_network else None
    return [LayerSource(_trial(name), num_experts, predictor, network)]


def _trial(source: str) -> Trial:
    return Trial(f"prefetching by {source}")


def _whole_pass_sources(
    model: LanguageModel, checkpoint: Checkpoint, config: EngineConfig, tables: ExpertTables | None
) -> Iterator[Source[Batch]]:
    """Yield the sources for an encoder's inputs and for generated tokens."""
    (folder, of_decoder), num_experts = _folders(checkpoint, config), model.config.routing.num_experts
    if isinstance(model, CausalLM):
        yield NetworkSource(_trial(WHOLE_PASS), num_experts, _texts(folder, model, checkpoint).named_for)
        return
    if tables is not None:
        yield InputSource(_trial(f"{WHOLE_PASS} of inputs"), num_experts, tables)
    if is_saved(of_decoder):
        texts, first_layer = _texts(of_decoder, model, checkpoint), model.config.num_encoder_moe_layers
        yield NetworkSource(_trial(WHOLE_PASS), num_experts, texts.named_for, first_layer=first_layer)


def expert_tables(
    model: LanguageModel, checkpoint: Checkpoint, config: EngineConfig, trace: Trace | None = None
) -> ExpertTables | None:
    """Return the tables of an encoder's inputs; None if nothing uses them.

    Raises: CheckpointError if the network was not trained for this checkpoint.
    """
    is_used = config.lossy_top_k or (config.experts is not None and config.experts.predictor == WHOLE_PASS)
    folder, _ = _folders(checkpoint, config)
    if not is_used or not isinstance(model, EncoderDecoderLM) or not is_saved(folder):
        return None
    network = for_serving(load_predictor(folder, checkpoint))
    top_k = max(network.shape.top_k, config.lossy_top_k)
    return ExpertTables(network, _embed_with(model), top_k=top_k, trace=trace)


def _folders(checkpoint: Checkpoint, config: EngineConfig) -> tuple[Path, Path]:
    return folders_of(checkpoint.path, used_packed_weights_file(config))


def _texts(folder: Path, model: LanguageModel, checkpoint: Checkpoint) -> FollowedTexts:
    """Raises: CheckpointError if the network is absent, or was trained for another checkpoint."""
    return FollowedTexts(for_serving(load_predictor(folder, checkpoint)), _embed_with(model))


def _embed_with(model: LanguageModel) -> Embed:
    return lambda token_ids: model.embed(torch.tensor(token_ids, device=model.device)).float().cpu()
