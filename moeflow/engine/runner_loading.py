"""From a configuration to a model that can be run: its weights, where its experts come from, and who watches it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.identity import checkpoint_identity
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.weight_memory import FreshMemory, WeightMemory
from moeflow.checkpoint.pooling_files import read_pooling
from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import EncoderInfo, ModelInfo
from moeflow.core.errors import CheckpointError, ConfigError
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import EncoderConfig, ModelConfig
from moeflow.core.pooling_params import PoolingParams
from moeflow.engine.compute_setup import device_of_arrays, device_of_layers, set_up
from moeflow.engine.model_runner import LossyExperts, ModelRunner, OtherProcesses, PassExperts
from moeflow.kernels.arrays import dtype_on
from moeflow.kernels.on_demand import on_demand
from moeflow.kernels.routing import Routing
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.importance import known_importance
from moeflow.models.layers.allocation.expert_homes import (
    ExpertHome,
    InCache,
    InMemory,
    OnBothProcessors,
    home_on_ranks,
)
from moeflow.models.layers.allocation.packed import PackedAllocator
from moeflow.models.layers.allocation.planar import PlanarAllocator
from moeflow.models.layers.allocation.tensors import SlabAllocator
from moeflow.models.layers.decoder import CausalLM
from moeflow.models.layers.moe import num_joined
from moeflow.models.layers.weight_allocator import WeightAllocator
from moeflow.models.loading import load_model
from moeflow.models.packing import largest_expert_bytes
from moeflow.models.plausibility import read_eos_token_ids
from moeflow.models.registry import read_model_config
from moeflow.pipeline.runtime.trace import Trace
from moeflow.planner.choices.packed_files import formats_of, map_packed, read_packed_experts
from moeflow.speculation.names import short_names

if TYPE_CHECKING:
    from moeflow.engine.ranks.ranks import Ranks
    from moeflow.models.language_model import LanguageModel
    from moeflow.parallel.group import OverlappingGroup

with on_demand(__name__):
    from moeflow.checkpoint.packed import resident_reader
    from moeflow.engine import (
        expert_store,
        hybrid_store,
        lossy_routing,
        prefetch_sources,
        routing_record,
    )
    from moeflow.engine.offload import offloaded_model
    from moeflow.engine.ranks import linked_ranks, rank_processes, rank_upkeep
    from moeflow.experts.hybrid import hybrid_experts
    from moeflow.kernels import capacity as expert_capacity
    from moeflow.kernels import packed_bands
    from moeflow.models.layers.ranks import own_tokens, summed_experts
    from moeflow.workload import routing_recorder, routing_trace

logger = logging.getLogger(__name__)


def load_runner(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> ModelRunner:
    """Return what runs the checkpoint that `config` names. Raises: CheckpointError, CapacityError, ConfigError."""
    set_up(config)
    with closing(open_checkpoint(config.model_path)) as checkpoint, ExitStack() as on_failure:
        experts = recorder = None
        trace = Trace(is_on=bool(config.trace_file or config.graph_file))
        if config.record_routing:
            recorder = routing_record.RoutingRecord(
                routing_recorder.RoutingRecorder(Path(config.record_routing), _trace_header(checkpoint, config))
            )
            on_failure.callback(recorder.close)
        if config.experts is not None:
            experts = expert_store.ExpertStore.open(checkpoint, config, on_bytes=progress, trace=trace)
            on_failure.callback(experts.close)
        ranks = _start_ranks(config)
        if ranks is not None:
            on_failure.callback(ranks.close)
        hybrid = _hybrid_layers(checkpoint, config, experts)
        memory = weight_memory(checkpoint, config, experts, progress)
        upkeep = None if ranks is None else make_upkeep(checkpoint, config, ranks.group)
        allocator = make_allocator(config, memory, experts, recorder, upkeep, hybrid)
        importance = known_importance(config.importance_file)
        model = load_model(
            checkpoint, allocator, num_threads=config.num_threads, progress=progress, importance=importance
        )
        if recorder is not None:
            recorder.routers = [block for _, block in model.moe_blocks()]
        networks = lossy = None
        if config.lossy_top_k or (experts is not None and hybrid is None):
            networks = prefetch_sources.PassNetworks(model, checkpoint, config, trace)
            on_failure.callback(networks.close)
            lossy = _lossy_routing(model, networks, config)
        if experts is not None and hybrid is None:
            assert networks is not None
            experts.prefetch_by(prefetch_sources.prefetch_sources(model, config, networks))
        served = served_model(model, config, upkeep, trace)
        on_failure.callback(served.close)
        if ranks is not None:
            ranks.wait_until_loaded()
        store = _pass_experts(hybrid, config, model.config, experts, on_failure)
        info = _describe(model.config, checkpoint, config)
        others, changing = OtherProcesses(ranks, upkeep), LossyExperts(lossy, allocator.capacity)
        runner = ModelRunner(served, config, info, store, recorder, trace, others, changing)
        on_failure.pop_all()
        if memory.pages is not None:
            memory.pages.begin()
            runner.close_too(memory.pages)
        return runner


def served_model(
    model: LanguageModel, config: EngineConfig, upkeep: rank_upkeep.RankUpkeep | None, trace: Trace | None = None
) -> LanguageModel | offloaded_model.OffloadedModel:
    """Return what computes a loaded model's passes: itself, or a pipeline. Raises: as `OffloadedModel`."""
    if config.offload is None:
        return model
    assert isinstance(model, CausalLM), "devices are for decoder-only models"
    return offloaded_model.OffloadedModel(model, config, trace, None if upkeep is None else upkeep.devices)


def _lossy_routing(
    model: LanguageModel, networks: prefetch_sources.PassNetworks, config: EngineConfig
) -> lossy_routing.LossyRouting | None:
    if not config.lossy_top_k:
        return None
    num_encoding, top_k = model.config.num_encoder_moe_layers, config.lossy_top_k
    rules = [cast(Routing, block.choose) for _, block in model.moe_blocks()][num_encoding:]
    choices: list[lossy_routing.Choices] = []
    if networks.tables is not None:
        choices.append(lossy_routing.InputChoices(networks.tables, num_encoding, top_k=top_k))
    if networks.texts is not None:
        choices.append(lossy_routing.TextChoices(networks.texts, rules, top_k=top_k))
    return lossy_routing.LossyRouting(model, choices)


def _start_ranks(config: EngineConfig) -> Ranks | None:
    if config.parallel is None:
        return None
    if config.parallel.links is not None:
        return linked_ranks.LinkedRanks(config.parallel)
    if config.parallel.is_spread:
        raise ConfigError(
            "ranks of other machines (--listen-ranks) are for `moeflow serve` and `moeflow batch`: use one of these, "
            "or ranks of this machine"
        )
    return rank_processes.RankProcesses(config, config.parallel)


def weight_memory(
    checkpoint: Checkpoint,
    config: EngineConfig,
    experts: expert_store.ExpertStore | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WeightMemory:
    """Return the memory of the weights, filled if they have been packed before."""
    if experts is not None and config.hybrid is None:
        return resident_reader.read_resident(experts.index)
    if config.hybrid is not None and config.hybrid.packed_experts_file:
        return read_packed_experts(checkpoint, config, progress)
    if not config.packed_file:
        return FreshMemory()
    as_tensors = device_of_arrays(config, read_model_config(checkpoint)) is not None
    return map_packed(checkpoint, config, progress, as_tensors=as_tensors)


def make_allocator(
    config: EngineConfig,
    memory: WeightMemory,
    experts: expert_store.ExpertStore | None = None,
    recorder: routing_record.RoutingRecord | None = None,
    ranks: rank_upkeep.RankUpkeep | None = None,
    hybrid: hybrid_experts.HybridLayers | None = None,
) -> WeightAllocator:
    """Return the places and formats of the layers' weights.

    The `ranks` share the model; `hybrid` has experts on a GPU and on the CPU.
    """
    device = None if memory.is_numpy else device_of_layers(config)
    dtype = dtype_on(config.dtype, device)
    on_route = None if recorder is None else recorder.on_route
    capacity = expert_capacity.ExpertCapacity(config.capacity_factor) if config.capacity_factor else None
    cuts = config.parallel is not None and config.parallel.attention_layout == "tensor"
    if not config.cpu_isa:
        routers = dtype_on(config.router_format, device)
        if config.offload is None:
            formats = formats_of(config)
            return PlanarAllocator(
                dtype,
                device,
                routers,
                formats=formats,
                home=None if hybrid is None else _home_on_both(config, hybrid, memory),
                tensor_group=None if ranks is None or not cuts else ranks.devices,
                expert_devices=_expert_devices(config, ranks),
                on_route=on_route,
                capacity=capacity,
            )
        return SlabAllocator(
            dtype,
            device,
            routers,
            memory,
            tensor_group=None if ranks is None else ranks.devices,
            expert_devices=_expert_devices(config, ranks),
            on_route=on_route,
            capacity=capacity,
        )
    return PackedAllocator(
        dtype,
        device,
        formats_of(config),
        memory,
        _expert_home(experts, ranks),
        tensor_group=None if ranks is None or not cuts else ranks.layer_group,
        own_layers=None if ranks is None else ranks.layers,
        on_route=on_route,
        capacity=capacity,
    )


def _expert_devices(config: EngineConfig, ranks: rank_upkeep.RankUpkeep | None) -> summed_experts.ExpertDevices | None:
    if ranks is None or ranks.devices is None:
        return None
    assert config.parallel is not None
    return summed_experts.ExpertDevices(ranks.devices, config.parallel.has_slices)


def _hybrid_layers(
    checkpoint: Checkpoint, config: EngineConfig, experts: expert_store.ExpertStore | None
) -> hybrid_experts.HybridLayers | None:
    if config.hybrid is None:
        return None
    shape = read_model_config(checkpoint)
    formats = _formats_of_experts(config, config.hybrid, shape)
    unknown = {name for of_layer in formats for name in of_layer} - set(packed_bands.FORMATS)
    if unknown:
        raise ConfigError(
            f"experts in {', '.join(sorted(unknown))} have no way to the GPU; those in "
            f"{', '.join(packed_bands.FORMATS)} have: choose one (--quantize), or the CPU alone (--device cpu)"
        )
    disk = None if experts is None else experts.pool
    device, own = device_of_layers(config), formats_of(config)
    layers = [own.layers[number] for number in shape.moe_layers] if own.layers else [None]
    can_join = device.type != "cpu" and all(map(own.joins_shared, layers))
    joined = num_joined(shape) if can_join else 0
    return hybrid_experts.HybridLayers(config.hybrid, formats, shape.routing.num_experts, device, disk, joined)


def _pass_experts(
    layers: hybrid_experts.HybridLayers | None,
    config: EngineConfig,
    shape: ModelConfig,
    experts: expert_store.ExpertStore | None,
    on_failure: ExitStack,
) -> PassExperts | None:
    """Return the experts of a loaded model; None: all are in one place."""
    if layers is None:
        return experts
    store = hybrid_store.HybridStore(layers, config, shape.routing.top_k, experts)
    on_failure.callback(store.pool.close)
    return store


def _formats_of_experts(
    config: EngineConfig, hybrid: HybridConfig, shape: ModelConfig
) -> list[tuple[WeightFormat, WeightFormat]]:
    """Return the formats of the CPU's experts in each layer that has experts: of gates and ups, and of downs."""
    if config.layer_formats:
        return [(it.up, it.down) for it in map(config.layer_formats.__getitem__, shape.moe_layers)]
    same = cast(WeightFormat, hybrid.cpu_weight_format)
    return [(same, same)] * shape.num_moe_layers


def _home_on_both(config: EngineConfig, layers: hybrid_experts.HybridLayers, memory: WeightMemory) -> OnBothProcessors:
    return OnBothProcessors(layers, config.is_wide, memory)


def _expert_home(experts: expert_store.ExpertStore | None, ranks: rank_upkeep.RankUpkeep | None) -> ExpertHome:
    if experts is not None:
        return InCache(experts.pool)
    if ranks is None:
        return InMemory()
    home = home_on_ranks(ranks.layer_group, ranks.experts)
    return home if ranks.rounds is None else own_tokens.OwnTokensHome(home, ranks.rounds)


def make_upkeep(checkpoint: Checkpoint, config: EngineConfig, group: OverlappingGroup) -> rank_upkeep.RankUpkeep:
    """Return a rank's part of the model, and its work between passes."""
    assert config.parallel is not None
    device = None if config.device == "cpu" and config.offload is None else device_of_layers(config)
    return rank_upkeep.RankUpkeep(group, read_model_config(checkpoint), config.parallel, device)


def _trace_header(checkpoint: Checkpoint, config: EngineConfig) -> routing_trace.TraceHeader:
    shape = read_model_config(checkpoint)
    return routing_trace.TraceHeader(
        identity=checkpoint_identity(checkpoint),
        num_layers=shape.num_moe_layers,
        num_experts=shape.routing.num_experts,
        top_k=shape.routing.top_k,
        slab_bytes=_expert_bytes(shape, config),
    )


def _describe_encoder(encoder: EncoderConfig, scheduler: SchedulerConfig) -> EncoderInfo:
    room = scheduler.max_num_batched_tokens - scheduler.max_num_seqs  # next to others, which need a token each
    return EncoderInfo(
        decoder_start_token_id=encoder.decoder_start_token_id,
        block_size=scheduler.block_size,
        max_input_tokens=max(room - 1, 0) // scheduler.block_size * scheduler.block_size,
    )


def _expert_bytes(shape: ModelConfig, config: EngineConfig) -> int:
    """Return what an expert takes packed; 0 where it is not."""
    if not config.cpu_isa:
        return 0
    return largest_expert_bytes(shape, formats_of(config))


def _describe(shape: ModelConfig, checkpoint: Checkpoint, config: EngineConfig) -> ModelInfo:
    return ModelInfo(
        name=config.model_name,
        path=config.model_path,
        model_type=shape.model_type,
        vocab_size=shape.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        eos_token_ids=read_eos_token_ids(checkpoint),
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_experts=shape.routing.num_experts,
        top_k=shape.routing.top_k,
        num_parameters=shape.num_parameters,
        num_active_parameters=shape.num_active_parameters,
        weight_format=config.weight_format,
        device=config.device if config.offload is None else str(device_of_layers(config)),
        kv_capacity_tokens=config.scheduler.num_blocks * config.scheduler.block_size,
        created=int(time.time()),
        speculators=tuple(short_names(config.speculators).values()),
        encoder=None if shape.encoder is None else _describe_encoder(shape.encoder, config.scheduler),
        labels=shape.labels,
        lossy_top_k=config.lossy_top_k,
        pooling=_pooling_of(checkpoint, shape),
        sampling_defaults=config.sampling_defaults,
    )


def _pooling_of(checkpoint: Checkpoint, shape: ModelConfig) -> PoolingParams | None:
    """Return the default pooling of vectors; None: as it is not done here, which keeps no one from the rest."""
    try:
        found = read_pooling(checkpoint.path)
        return found or PoolingParams(kind="last" if shape.encoder is None else "mean")
    except CheckpointError as error:
        logger.warning("the model's own pooling for vectors is not used: %s", error)
        return None
