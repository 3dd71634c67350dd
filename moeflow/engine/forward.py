"""One forward pass from the numbers of a batch: what a process computes of it, in whatever way it has the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, cast

from moeflow.core.engine_config import EngineConfig
from moeflow.core.model_config import ModelConfig
from moeflow.engine.compute_setup import device_of_arrays
from moeflow.kernels.arrays import Array, rows_of
from moeflow.kernels.on_demand import on_demand, torch, without_gradients
from moeflow.kv.storage import KVStorage
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.pass_input import PassInput
from moeflow.parallel.blocks import with_kv_heads_of
from moeflow.parallel.stages import layers_of

if TYPE_CHECKING:
    from moeflow.engine.offload.offloaded_model import OffloadedModel
    from moeflow.engine.ranks.rank_upkeep import RankUpkeep
    from moeflow.kernels.arrays import Device
    from moeflow.models.language_model import LanguageModel

with on_demand(__name__):
    from moeflow.engine import decode_graphs
    from moeflow.engine.ranks import alternating_forward, own_sequences, stage_forward
    from moeflow.kv import state_storage


def make_kv_storage(config: EngineConfig, shape: ModelConfig, rank: int = 0) -> KVStorage:
    """Return the storage of keys, values and states that an engine's configuration asks for, of what a rank has."""
    own, slots = layers_of(config.parallel, shape, rank), config.scheduler.states
    of_rank = with_kv_heads_of(shape, config.parallel, rank)
    device = device_of_arrays(config, shape)
    storage = KVStorage(
        layers=[layer_idx for layer_idx in shape.kv_layers if layer_idx in own],
        num_blocks=config.scheduler.num_blocks,
        block_size=config.scheduler.block_size,
        num_kv_heads=of_rank.attention.num_kv_heads,
        head_dim=shape.attention.head_dim,
        latent_dim=shape.attention.latent_dim,
        other_heads=of_rank.attention.other_heads,
        dtype=config.kv_dtype,
        device=device,
        gives_back=config.experts is not None and config.hybrid is None,
    )
    if shape.recurrent is not None and slots is not None:
        storage.states = state_storage.StateStorage(shape.recurrent, slots.num_slots, device)
    return storage


class Forward(Protocol):
    """Computes passes; keys and values go to the storage it was made with."""

    def num_micro_batches(self, num_tokens: int) -> int:
        """Return into how many micro-batches a pass of so many tokens is best cut."""

    def run(self, given: PassInput) -> Iterator[Array]:
        """Compute a pass; return hidden states after the final norm, [n, H] for each of `given.row_groups()`.

        Raises: GroupError; StorageError if an expert cannot be read.
        """

    def close(self) -> None:
        """End threads; nothing is run any more."""


class WholeForward:
    """That of a process which runs all layers, be it only its part of each."""

    def __init__(self, model: LanguageModel | OffloadedModel, kv: KVStorage, device: Device) -> None:
        self._model, self._kv, self._device = model, kv, device

    def num_micro_batches(self, num_tokens: int) -> int:
        """See `Forward`: one, since no other device computes at the same time."""
        return 1

    @without_gradients
    def run(self, given: PassInput) -> Iterator[Array]:
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
    steps: decode_graphs.HostSteps | None = None,
) -> Forward:
    """Return how this process computes passes.

    `upkeep`: of a rank that shares the model; `steps`: of passes on a GPU, which the host computes.
    """
    parallel = config.parallel
    device = device_of_arrays(config, model.config)
    if config.device != "cpu" and decode_graphs.can_capture(model, config):
        assert isinstance(model, CausalLM)
        return decode_graphs.GraphForward(model, kv, torch.device(config.device), config.scheduler, steps)
    if upkeep is not None and upkeep.alternating is not None and parallel is not None:
        assert isinstance(model, CausalLM), "only decoders are cut into micro-batches"
        return alternating_forward.AlternatingForward(model, kv, upkeep.alternating, parallel.alternating_tokens)
    if upkeep is not None and upkeep.rounds is not None:
        return own_sequences.OwnSequencesForward(cast("LanguageModel", model), kv, upkeep.rounds)  # in memory
    if upkeep is None or parallel is None or parallel.stages is None:
        return WholeForward(model, kv, device)
    assert isinstance(model, CausalLM), "ranks keep their weights in memory"
    return stage_forward.StageForward(model, kv, upkeep.group, parallel, parallel.stages)
