"""One forward pass from the numbers of a batch: what a process computes of it, in whatever way it has the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from moeflow.core.engine_config import EngineConfig
from moeflow.core.model_config import ModelConfig
from moeflow.engine.in_flight_forward import InFlightForward
from moeflow.engine.offload.offloaded_model import OffloadedModel
from moeflow.engine.ranks.rank_upkeep import RankUpkeep
from moeflow.engine.ranks.stage_forward import StageForward
from moeflow.kv.storage import KVStorage
from moeflow.models.language_model import LanguageModel
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.expert_shares import ExpertShares
from moeflow.models.pass_input import PassInput, rows_of
from moeflow.parallel.blocks import num_kv_heads
from moeflow.parallel.stages import layers_of


def make_kv_storage(config: EngineConfig, shape: ModelConfig, rank: int = 0) -> KVStorage:
    """Return the storage of keys and values that an engine's configuration asks for, of what a rank has."""
    return KVStorage(
        layers=layers_of(config.parallel, shape, rank),
        num_blocks=config.scheduler.num_blocks,
        block_size=config.scheduler.block_size,
        num_kv_heads=num_kv_heads(shape, config.parallel, rank),
        head_dim=shape.head_dim,
        dtype=getattr(torch, config.kv_dtype),
        device=torch.device(config.device),
        gives_back=config.experts is not None,
    )


class Forward(Protocol):
    """Computes passes; keys and values go to the storage it was made with."""

    def num_micro_batches(self, num_tokens: int) -> int:
        """Return into how many micro-batches a pass of so many tokens is best cut."""

    def run(self, given: PassInput) -> Iterator[Tensor]:
        """Compute a pass; return hidden states after the final norm, [n, H] for each of `given.row_groups()`.

        Raises: GroupError; StorageError if an expert cannot be read.
        """

    def close(self) -> None:
        """End threads; nothing is run any more."""


class WholeForward:
    """That of a process which runs all layers, be it only its part of each."""

    def __init__(self, model: LanguageModel | OffloadedModel, kv: KVStorage, device: torch.device) -> None:
        self._model, self._kv, self._device = model, kv, device

    def num_micro_batches(self, num_tokens: int) -> int:
        """See `Forward`: one, as nobody else would compute at the same time."""
        return 1

    @torch.inference_mode()
    def run(self, given: PassInput) -> Iterator[Tensor]:
        """See `Forward`."""
        hidden = self._model(*given.tensors(self._kv, self._device))
        return (rows_of(hidden, rows) for rows in given.row_groups())

    def close(self) -> None:
        """See `Forward`: there are none."""


def make_forward(
    config: EngineConfig,
    model: LanguageModel | OffloadedModel,
    kv: KVStorage,
    upkeep: RankUpkeep | None,
    shares: ExpertShares | None = None,
) -> Forward:
    """Return how this process computes passes.

    `upkeep`: of a rank that shares the model; `shares`: of a replica whose passes may be cut.
    """
    parallel = config.parallel
    if shares is not None:
        assert isinstance(model, CausalLM), "replicas that share experts keep their weights in memory"
        return InFlightForward(model, kv, shares)
    if upkeep is None or parallel is None or parallel.stages is None:
        return WholeForward(model, kv, torch.device(config.device))
    assert isinstance(model, CausalLM), "ranks keep their weights in memory"
    return StageForward(model, kv, upkeep.group, parallel, parallel.stages)
