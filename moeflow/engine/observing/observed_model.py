"""A loaded model as an observer sees it: its routers, the places of its experts, and its reads from disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.model_config import ModelConfig
from moeflow.engine.forward import Forward
from moeflow.engine.observing.observed_pass import input_spans, output_spans, whole_spans
from moeflow.engine.observing.pass_folding import LayerGroup
from moeflow.engine.observing.residency import Residency
from moeflow.engine.observing.routing_tap import RoutingTap
from moeflow.parallel.stages import layers_of

if TYPE_CHECKING:
    from moeflow.engine.expert_store import ExpertStore
    from moeflow.engine.offload.offloaded_model import OffloadedModel
    from moeflow.models.language_model import LanguageModel
    from moeflow.pipeline.runtime.recording import Recording

_DENSE: Final = "the model has no experts"


class RecordsSpans(Protocol):
    """Records the spans of all lanes in passes, while an observer asks for them."""

    def recording(self, num_passes: int) -> Recording:
        """Return the spans of the last passes. The first call begins to record them. Between passes."""

    def end_recording(self) -> None:
        """Record no more, and forget the spans so far. Between passes."""


class ObservedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    layers: list[int]  # numbers of the layers with routers that this process has; an encoder's come first
    num_encoder_layers: int  # of these
    num_experts: int
    top_k: int
    groups: Sequence[LayerGroup]  # of `layers`
    tap: RoutingTap
    is_counted: bool  # whether choices can be counted at all
    not_counted: str  # missing layers or passes, and the reason; empty: none are missing
    residency: Residency
    disk: ExpertStore | None  # where experts come from; None: all are in memory
    waited_s: Callable[[], float]  # that passes have waited for other ranks, the mean of ranks, or for a GPU
    spans: RecordsSpans

    def reads(self) -> tuple[float, int]:
        """Return the seconds that passes have waited for experts, and the bytes read of them."""
        return (0.0, 0) if self.disk is None else (self.disk.cache.stall_s, self.disk.cache.read_bytes)


def observed_model(
    model: LanguageModel | OffloadedModel,
    forward: Forward,
    config: EngineConfig,
    residency: Residency,
    disk: ExpertStore | None,
    waited_s: Callable[[], float],
    spans: RecordsSpans,
) -> ObservedModel:
    """Return the model of this process, the first rank, as an observer sees it."""
    shape = model.config
    is_counted = bool(shape.routing.num_experts) and not _has_several_orders(config, shape)
    encoder, decoder = _layers_with_routers(config, shape) if is_counted else ([], [])
    groups, not_counted = _groups(len(encoder), len(decoder), config), _not_counted(config, shape, len(decoder))
    top_k = config.lossy_top_k or shape.routing.top_k
    return ObservedModel(
        layers=[*encoder, *decoder],
        num_encoder_layers=len(encoder),
        num_experts=shape.routing.num_experts,
        top_k=top_k,
        groups=groups,
        tap=RoutingTap(model, forward, [group.layers for group in groups], top_k),
        is_counted=is_counted,
        not_counted=not_counted,
        residency=residency,
        disk=disk,
        waited_s=waited_s,
        spans=spans,
    )


def _layers_with_routers(config: EngineConfig, shape: ModelConfig) -> tuple[list[int], list[int]]:
    """Return the numbers of the encoder's and of the decoder's layers with routers that this process has."""
    own = layers_of(config.parallel, shape, 0)
    encoder: list[int] = []
    if shape.encoder is not None and shape.routing.num_experts:
        encoder = [layer for layer in range(shape.encoder.num_layers) if layer not in shape.encoder.dense_layers]
    return encoder, [layer for layer in shape.moe_layers if layer in own]


def _groups(num_encoder: int, num_decoder: int, config: EngineConfig) -> list[LayerGroup]:
    """Return the layers that get the same rows: those of an encoder, and those of a decoder."""
    num_layers, block_size = num_encoder + num_decoder, config.scheduler.block_size
    if not num_encoder:
        return [LayerGroup(range(num_layers), whole_spans)] if num_layers else []
    groups = [LayerGroup(range(num_encoder), input_spans)]
    if num_decoder:
        groups.append(LayerGroup(range(num_encoder, num_layers), partial(output_spans, block_size=block_size)))
    return groups


def _has_several_orders(config: EngineConfig, shape: ModelConfig) -> bool:
    """Whether layers get rows in different orders, where ranks have sequences of their own."""
    return shape.encoder is not None and config.parallel is not None and config.parallel.has_own_sequences


def _not_counted(config: EngineConfig, shape: ModelConfig, num_own: int) -> str:
    if not shape.routing.num_experts:
        return _DENSE
    if _has_several_orders(config, shape):
        return "all choices: an encoder's and a decoder's tokens are on several ranks (--attention-layout data)"
    if num_own < len(shape.moe_layers):
        others = [layer for layer in shape.moe_layers if layer not in layers_of(config.parallel, shape, 0)]
        return f"layers {others[0]} to {others[-1]}: other ranks have these stages, and do not report their choices"
    return ""
