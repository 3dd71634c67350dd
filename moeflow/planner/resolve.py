"""From what the user said to what the engine runs with. After `decide`, nothing is left on "auto".

Only headers are read; every choice carries its reason, and what cannot fit is refused before loading.
"""

from __future__ import annotations

from pathlib import Path

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, MemoryPlan, SchedulerConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_model_config
from moeflow.planner.choices.device_offload import computes_in_torch, device_overrides, settings_of_host, with_pipeline
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.kv_cache_choice import choose_kv_cache, kv_share, min_kv_bytes, num_kept_blocks
from moeflow.planner.choices.memory_allowance import free_bytes
from moeflow.planner.choices.packed_files import find_packed_weights_file
from moeflow.planner.choices.processor_choice import Reasons, choose_cpu_isa, choose_device, choose_num_threads
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, for_torch, own_precision
from moeflow.planner.costs.process_memory import PROCESS_BYTES, margin_bytes, planned_bytes
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.hardware.host import Machine, measure_machine
from moeflow.planner.settings import (
    BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DISK_NUM_BATCHED_TOKENS,
    Settings,
)

_SMALLER = {  # what to ask for instead of a format
    "float32": "--dtype bfloat16 or a smaller model",
    "bfloat16": "--quantize int8 or a smaller model",
    "int8": "--quantize int4 or a smaller model",
    "int4": "a smaller model",
    "int4-min": "a smaller model",
}


def decide(settings: Settings, machine: Machine | None = None) -> EngineConfig:
    """Turn settings into a configuration for this model on this machine.

    Raises: ConfigError for a setting that makes no sense, CapacityError if model or cache do not fit,
    CheckpointError if the model cannot be read. `settings.model` must name a path.
    """
    if settings.model is None:
        raise ConfigError("no model is named")
    settings.check_counts()
    machine = machine or measure_machine()
    overrides = device_overrides(settings, machine)
    checkpoint = open_checkpoint(settings.model)
    try:
        shape = read_model_config(checkpoint)
        if overrides is None:
            return _Decision(settings, machine, checkpoint, shape).config()
        on_host = settings_of_host(settings, overrides)
        in_torch = computes_in_torch(overrides)
        config = _Decision(on_host, machine, checkpoint, shape, offloads_to_torch=in_torch).config()
        return with_pipeline(config, overrides, shape)
    finally:
        checkpoint.close()


class _Decision:
    """The choices, made in order, each with its reason."""

    def __init__(
        self,
        settings: Settings,
        machine: Machine,
        checkpoint: Checkpoint,
        shape: ModelConfig,
        *,
        offloads_to_torch: bool = False,
    ) -> None:
        """`offloads_to_torch`: this is for the host of a device that computes in torch."""
        self.settings = settings
        self.offloads_to_torch = offloads_to_torch
        self.machine = machine
        self.shape = shape
        self.checkpoint = checkpoint
        self.reasons: Reasons = []

    def config(self) -> EngineConfig:
        settings, reasons = self.settings, self.reasons
        device = choose_device(settings.device, self.machine, reasons)
        self.free_bytes = free_bytes(settings, self.machine, device)
        cpu_isa = "" if self.offloads_to_torch else choose_cpu_isa(settings.cpu_isa, device, reasons)
        max_num_seqs = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        max_num_batched_tokens = settings.max_num_batched_tokens or max(DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs)
        self.process_bytes, self.work_bytes = self._beside_weights(cpu_isa, max_num_batched_tokens, max_num_seqs)
        weights = self._weights(device, can_pack=bool(cpu_isa))
        dtype = "float32" if cpu_isa else weights.matrices
        is_limited = bool(cpu_isa and settings.memory_bytes)
        plan = self._expert_plan(weights, dtype) if is_limited else None
        if plan is not None and settings.max_num_batched_tokens is None:
            max_num_batched_tokens = self._streamed_batch_tokens(plan, max_num_batched_tokens, max_num_seqs)
            self.process_bytes, self.work_bytes = self._beside_weights(cpu_isa, max_num_batched_tokens, max_num_seqs)
        weight_bytes = self._check_weights(weights, plan)
        share = kv_share(has_slots=plan is not None, is_limited=is_limited)
        attends_in_torch = device != "cpu" or self.offloads_to_torch or not extension.is_available()
        cache = choose_kv_cache(
            settings,
            self.shape,
            torch_dtype=dtype if attends_in_torch else None,
            left_bytes=self.free_bytes - weight_bytes - self._overhead_bytes,
            share=share,
            max_num_seqs=max_num_seqs,
            reasons=reasons,
        )
        return EngineConfig(
            model_path=str(self.checkpoint.path),
            model_name=settings.model_name or self.checkpoint.path.stem,
            dtype=dtype,
            weight_format=weights.matrices,
            embedding_format=weights.embeddings,
            router_format=weights.routers,
            is_wide=weights.is_exact,
            cpu_isa=cpu_isa,
            kv_dtype=cache.dtype,
            device=device,
            num_threads=choose_num_threads(settings.num_threads, self.machine, reasons),
            scheduler=SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_blocks=cache.num_blocks,
                max_model_len=cache.max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefix_caching=settings.prefix_caching,
                num_kept_blocks=None if plan is None else num_kept_blocks(settings, cache, share),
            ),
            kv_cache_bytes=cache.num_bytes,
            experts=None if plan is None else self._expert_slots(plan),
            packed_file=self._packed_file(weights) if cpu_isa and plan is None else "",
            device_memory_bytes=settings.device_memory_bytes or 0,
            memory=self._memory_plan(weight_bytes if plan is None else plan.resident_bytes),
            record_routing=self._record_routing(),
            graph_file=_absolute(settings.graph_file),
            trace_file=_absolute(settings.trace_file),
            reasons=tuple(reasons),
        )

    def _record_routing(self) -> str:
        """Return the file for what routers choose. Raises: ConfigError if there are no routers."""
        if self.settings.record_routing is not None and not self.shape.num_experts:
            raise ConfigError("this is a dense model: it has no routing to record (--record-routing)")
        return _absolute(self.settings.record_routing)

    def _beside_weights(self, cpu_isa: str, max_num_batched_tokens: int, max_num_seqs: int) -> tuple[int, int]:
        """Return what processes will hold, and a pass's work space; both matter to the byte only within a limit."""
        if not cpu_isa or self.settings.memory_bytes is None:
            return PROCESS_BYTES, 0
        held_bytes = planned_bytes(self.machine.process_bytes, self.shape, is_served=self.settings.is_served)
        work = work_bytes(self.shape, num_tokens=max_num_batched_tokens, num_sampled=max_num_seqs)
        return held_bytes + margin_bytes(is_served=self.settings.is_served), work

    def _streamed_batch_tokens(self, plan: ExpertPlan, least: int, max_num_seqs: int) -> int:
        """Return how many tokens a pass may have whose experts come from disk, of which any prompt needs nearly all."""
        left_bytes = self.free_bytes - plan.min_bytes - self.process_bytes
        for num_tokens in DISK_NUM_BATCHED_TOKENS:
            work = work_bytes(self.shape, num_tokens=num_tokens, num_sampled=max_num_seqs)
            if num_tokens > least and work <= left_bytes // 8:
                self.reasons.append(
                    ("max_num_batched_tokens", f"{num_tokens}: a long prompt then reads its experts once")
                )
                return num_tokens
        return least

    @property
    def _overhead_bytes(self) -> int:
        return self.process_bytes + self.work_bytes

    def _memory_plan(self, weight_bytes: int) -> MemoryPlan | None:
        if self.settings.memory_bytes is None:
            return None
        return MemoryPlan(
            limit_bytes=self.settings.memory_bytes,
            process_bytes=self.process_bytes,
            weight_bytes=weight_bytes,
            work_bytes=self.work_bytes,
            is_served=self.settings.is_served,
        )

    def _expert_plan(self, weights: WeightChoice, dtype: str) -> ExpertPlan | None:
        """Return how experts come from disk; None if there are none, or all that is needed fits into memory."""
        if not self.shape.num_experts or self._left(weights) >= min_kv_bytes(self.settings, self.shape, dtype):
            return None
        return ExpertPlan.make(
            self.checkpoint,
            self.shape,
            weights,
            packed_weights_file=self.settings.packed_weights_file,
            cache_dir=self.settings.cache_dir,
            policy=self.settings.expert_policy,
            predictor=self.settings.predictor,
        )

    def _expert_slots(self, plan: ExpertPlan) -> ExpertSlotsConfig:
        """Return the slots there are while keys, values and work space need nothing."""
        config = plan.slots(self.free_bytes - plan.resident_bytes - self.process_bytes)
        self.reasons.append(("experts", plan.reason(config)))
        return config

    def _weights(self, device: str, *, can_pack: bool) -> WeightChoice:
        choice = explicit_choice(self.settings.dtype, self.settings.quantize, can_pack=can_pack)
        if choice is None:
            if can_pack:
                choice = own_precision(self.checkpoint, self._keeps_precision)
            else:
                is_cpu = device == "cpu" and not self.offloads_to_torch
                choice = for_torch(self.checkpoint, lambda it: self._left(it) >= self.free_bytes / 2, is_cpu=is_cpu)
            self.reasons.append(("weights", f"{choice.matrices}: {choice.reason}"))
        return choice.with_routers(self.checkpoint)

    def _keeps_precision(self, weights: WeightChoice) -> bool:
        """Say whether float32 may stay: with a memory limit, what does not fit comes from disk."""
        return self.settings.memory_bytes is not None or self._left(weights) >= 0

    def _left(self, weights: WeightChoice) -> float:
        """Return the bytes that weights and process leave; negative if they do not fit."""
        return self.free_bytes - weights.num_bytes(self.checkpoint) - self._overhead_bytes

    def _packed_file(self, weights: WeightChoice) -> str:
        """Return the packed weights that all weights are mapped from; empty if there is none."""
        named = self.settings.packed_weights_file
        file = find_packed_weights_file(self.checkpoint, weights.formats, named, self.settings.cache_dir)
        if file is not None:
            self.reasons.append(("start", f"weights are mapped from {file}, as `moeflow pack` left them"))
        elif named is not None:
            self.reasons.append(("start", f"weights are packed anew: {named} is not there (`moeflow pack` makes it)"))
        return "" if file is None else str(file)

    def _check_weights(self, weights: WeightChoice, plan: ExpertPlan | None) -> int:
        """Return the bytes of the weights that must be in memory. Raises: CapacityError if they do not fit."""
        num_bytes = weights.num_bytes(self.checkpoint) if plan is None else plan.min_bytes
        if num_bytes + self._overhead_bytes > self.free_bytes:
            if plan is not None:
                raise CapacityError(
                    f"{format_bytes(plan.resident_bytes)} of the weights must be in memory, and {plan.min_slots} "
                    f"experts at a time: with the process that is {format_bytes(num_bytes + self._overhead_bytes)} in "
                    f"{weights.matrices}, but {format_bytes(self.free_bytes)} are allowed: raise the memory limit "
                    f"(--memory), or use {_SMALLER[weights.matrices]}"
                )
            raise CapacityError(
                f"the weights need {format_bytes(num_bytes)} in {weights.matrices} and the process "
                f"{format_bytes(self._overhead_bytes)} more, but {format_bytes(self.free_bytes)} of memory are free: "
                f"use {_SMALLER[weights.matrices]}, or free memory{self._hint()}"
            )
        return num_bytes

    def _hint(self) -> str:
        can_stream = self.shape.num_experts and self.settings.memory_bytes is None and extension.is_available()
        return "; or set a limit (--memory) and have experts come from disk" if can_stream else ""


def _absolute(file: Path | None) -> str:
    return "" if file is None else str(file.absolute())
