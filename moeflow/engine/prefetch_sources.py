"""The prefetch sources of a model: which ones its configured predictor means, and the networks that they need."""

from __future__ import annotations

from collections.abc import Iterator

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
from moeflow.models.expert_predictor.saved import folders_of, is_saved, load_predictor, needed_folders
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.encoder_decoder import EncoderDecoderLM
from moeflow.pipeline.runtime.trace import Trace
from moeflow.planner.choices.packed_files import used_packed_weights_file


class PassNetworks:
    """The trained networks that know a pass's experts before it begins, as far as a configuration uses them."""

    def __init__(
        self, model: LanguageModel, checkpoint: Checkpoint, config: EngineConfig, trace: Trace | None = None
    ) -> None:
        """Load them. Raises: CheckpointError if one has to be trained, and was not for this checkpoint."""
        self.tables: ExpertTables | None = None  # of an encoder's inputs
        self.texts: FollowedTexts | None = None  # of a decoder's tokens
        name = NO_PREDICTOR if config.experts is None else config.experts.predictor
        is_lossy = bool(config.lossy_top_k)
        folders = folders_of(checkpoint.path, used_packed_weights_file(config))
        needed = needed_folders(folders, model.config) if is_lossy or name == WHOLE_PASS else []
        if not is_lossy and isinstance(model, EncoderDecoderLM):
            needed = list(filter(is_saved, needed))
        if name == COMBINED and isinstance(model, CausalLM):
            needed = list(filter(is_saved, folders[:1]))
        for folder in needed:
            network, embed = for_serving(load_predictor(folder, checkpoint)), _embed_with(model)
            top_k = max(network.shape.top_k, config.lossy_top_k)
            if network.shape.is_causal:
                self.texts = FollowedTexts(network, embed, top_k=top_k, from_start=is_lossy)
            else:
                self.tables = ExpertTables(network, embed, top_k=top_k, trace=trace)

    def close(self) -> None:
        """End the lane of the tables."""
        if self.tables is not None:
            self.tables.close()


def prefetch_sources(model: LanguageModel, config: EngineConfig, networks: PassNetworks) -> list[Source[Batch]]:
    """Return the sources for a model whose experts come from disk."""
    assert config.experts is not None
    name = config.experts.predictor
    if name == NO_PREDICTOR:
        return []
    num_experts = model.config.routing.num_experts
    if name == WHOLE_PASS:
        return list(_whole_pass_sources(model.config.num_encoder_moe_layers, num_experts, networks))
    routers = [block for _, block in model.moe_blocks()]
    is_usable = name == COMBINED and isinstance(model, CausalLM)  # one of a decoder with an encoder omits its layers
    network = networks.texts.named_for if is_usable and networks.texts is not None else None
    num_layers = model.config.num_moe_layers
    predictor = PREDICTORS[name](RoutedModel(num_layers, num_experts, routers, has_network=network is not None))
    return [LayerSource(_trial(name), num_experts, predictor, network)]


def _trial(source: str) -> Trial:
    return Trial(f"prefetching by {source}")


def _whole_pass_sources(first_layer: int, num_experts: int, networks: PassNetworks) -> Iterator[Source[Batch]]:
    """Yield the sources for an encoder's inputs and for generated tokens, whose layers begin at `first_layer`."""
    if networks.tables is not None:
        yield InputSource(_trial(f"{WHOLE_PASS} of inputs"), num_experts, networks.tables)
    if networks.texts is not None:
        yield NetworkSource(_trial(WHOLE_PASS), num_experts, networks.texts.named_for, first_layer=first_layer)


def _embed_with(model: LanguageModel) -> Embed:
    return lambda token_ids: model.embed(torch.tensor(token_ids, device=model.device)).float().cpu()
