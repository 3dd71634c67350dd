"""From what the user said to what the engine runs with. After `decide`, nothing is left on "auto".

Only headers are read; every choice carries its reason, and what cannot fit is refused before loading.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.engine_config import EngineConfig, ExpertSlotsConfig, MemoryPlan, SchedulerConfig
from moeflow.core.errors import CapacityError, ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import PREFIX, CudaDeviceConfig, DeviceConfig
from moeflow.core.units import format_bytes
from moeflow.engine.expert_plan import ExpertPlan
from moeflow.engine.machine import Machine, measure_machine
from moeflow.engine.offload_plan import OffloadWishes, costs_of, offload_wishes, plan_offload
from moeflow.engine.process_memory import PROCESS_BYTES, margin_bytes, planned_bytes
from moeflow.engine.slab_files import find_slab_file
from moeflow.engine.weight_choice import WeightChoice, for_torch, own_precision, wished
from moeflow.engine.work_space import work_bytes
from moeflow.kernels import cpu
from moeflow.layers.placement import WeightFormats
from moeflow.models.registry import read_model_config

BLOCK_SIZE = 16
DEFAULT_MAX_RUNNING = 32
OFFLOADED_MAX_RUNNING = 256  # where weights go to a device for each pass: the more requests share that, the better
OFFLOADED_BATCH_TOKENS = 2048
DEFAULT_MAX_BATCH_TOKENS = 512  # on two CPU cores about a second: the longest that decodes wait for a prefill
STREAMED_BATCH_TOKENS = (2048, 1024)  # where each such pass reads most of the model: the first with room for its work
KV_SHARE = 0.25  # of what is free once the weights are loaded
KV_SHARE_BESIDE_SLOTS = 0.5  # if experts come from disk, from whose slots keys and values take what they need
KV_SHARE_KEPT = 0.125  # that unused keys and values keep there: the more experts are in memory, the less is read
LEAST_KV_TOKENS = 2048  # weights that leave no room for so many do not count as fitting into --memory
KV_DTYPES = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 4)}  # bytes of a value, of a head's scale

_SMALLER = {  # what to ask for instead of a format
    "float32": "--dtype bfloat16, a smaller model,",
    "bfloat16": "--quantize int8, a smaller model,",
    "int8": "--quantize int4, a smaller model,",
    "int4": "a smaller model",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user said. None or "auto": decide for me."""

    model: str | None = None  # Hugging Face folder or GGUF file; None: the built-in model
    model_name: str | None = None
    dtype: str = "auto"
    quantize: str | None = None  # "int8" or "int4"; None: leave the weights as they are
    kv_dtype: str = "auto"
    device: str = "auto"
    pipeline: str | None = None  # by which weights go to a device that is smaller than the model
    micro_batch: int | None = None  # tokens that go through such a pipeline together
    resident_experts: float | None = None  # share of them that stays on such a device
    num_threads: int | None = None
    max_model_len: int | None = None
    max_running: int | None = None
    max_batch_tokens: int | None = None
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    memory_bytes: int | None = None  # for everything; experts that do not fit come from disk
    device_memory_bytes: int | None = None  # of an accelerator's memory, that the engine may use
    is_served: bool = False  # by a process of its own, which memory_bytes has to cover, too
    slab_file: Path | None = None  # packed weights, or where experts will be packed; None: one in cache_dir
    expert_policy: str = "auto"  # which expert leaves memory for another
    predictor: str = "auto"  # what experts are read ahead by
    record_routing: Path | None = None  # file that gets what routers choose
    graph_file: Path | None = None  # file that gets a pass's tasks as a graph, for GraphViz
    trace_file: Path | None = None  # file that gets what each lane did when, for Perfetto
    cpu_isa: str = ""  # the best instruction set that the CPU kernels may use; empty: the best there is
    cache_dir: Path | None = None  # where the built-in model and packed experts are kept


def decide(settings: Settings, machine: Machine | None = None) -> EngineConfig:
    """Turn settings into a configuration for this model on this machine.

    Raises: ConfigError for a wish that makes no sense, CapacityError if model or cache do not fit,
    CheckpointError if the model cannot be read. `settings.model` must name a path.
    """
    if settings.model is None:
        raise ConfigError("no model is named")
    machine = machine or measure_machine()
    offload = _offload_wishes(settings, machine)
    checkpoint = open_checkpoint(settings.model)
    try:
        shape = read_model_config(checkpoint)
        if offload is None:
            return _Decision(settings, machine, checkpoint, shape).config()
        in_torch = isinstance(offload.device, CudaDeviceConfig) or offload.device.computes_in_torch
        on_host = _for_offloading(settings, offload.device, in_torch=in_torch)
        config = _Decision(on_host, machine, checkpoint, shape, offloads_to_torch=in_torch).config()
        return _offloaded(config, offload, shape)
    finally:
        checkpoint.close()


def _offload_wishes(settings: Settings, machine: Machine) -> OffloadWishes | None:
    """Return what the user said of a device that is smaller than the model. Raises: ConfigError, CapacityError."""
    allowed_bytes = settings.device_memory_bytes or machine.accelerator_free_bytes
    wishes = offload_wishes(
        settings.device,
        settings.pipeline,
        settings.micro_batch,
        settings.resident_experts,
        cuda_bytes=allowed_bytes,
    )
    if wishes is None or not isinstance(wishes.device, CudaDeviceConfig):
        return wishes
    if machine.accelerator is None:
        raise _no_cuda(settings.device)
    memory_bytes = _allowed("device memory", wishes.device.memory_bytes, machine.accelerator_free_bytes)
    if settings.device_memory_bytes not in (None, memory_bytes):
        raise ConfigError(
            f"--device {settings.device} and --device-memory {format_bytes(allowed_bytes)} say different things: "
            "leave one of them away"
        )
    return wishes


def _no_cuda(device: str) -> ConfigError:
    return ConfigError(
        f"device {device} is asked for, but torch finds no CUDA device here; use --device cpu, or have this machine "
        "play a device that is smaller than the model: --device emulated:16GiB,12 (its memory, and GB a second of its "
        "link)"
    )


def _for_offloading(settings: Settings, device: DeviceConfig, *, in_torch: bool) -> Settings:
    """Return what holds for the host of a smaller device. Raises: ConfigError for what pipelines do not do."""
    if in_torch and settings.slab_file is not None:
        raise ConfigError(
            "--slabs names weights that are packed for the CPU's kernels, but torch computes: leave it away"
        )
    for name, value in (("--memory", settings.memory_bytes), ("--record-routing", settings.record_routing)):
        if value is not None:
            raise ConfigError(
                f"{name} does not go with a device that is smaller than the model: leave one of them away"
            )
    return replace(
        settings,
        device="cpu",
        device_memory_bytes=None if isinstance(device, CudaDeviceConfig) else settings.device_memory_bytes,
        prefix_caching=False,  # or micro-batches could need blocks that others of the same pass write
        max_running=settings.max_running or OFFLOADED_MAX_RUNNING,
        max_batch_tokens=settings.max_batch_tokens or max(OFFLOADED_BATCH_TOKENS, settings.max_running or 0),
    )


def _offloaded(config: EngineConfig, wishes: OffloadWishes, shape: ModelConfig) -> EngineConfig:
    """Return a configuration whose passes go through a pipeline. Raises: ConfigError, CapacityError."""
    costs = costs_of(shape, config.weight_format, config.embedding_format, config.kv_dtype, config.dtype)
    offload = plan_offload(wishes, costs, config.scheduler)
    if not config.cpu_isa and not offload.computes_in_torch:
        raise ConfigError(
            f"an emulated device computes with the CPU extension: {cpu.why_not()}. Install it, or have torch compute: "
            f"--device {PREFIX}:MEMORY,LINK,torch"
        )
    how = f"{offload.pipeline}, in micro-batches of {offload.micro_batch_tokens} tokens"
    stay = f"{offload.num_resident_experts} of {max(shape.num_experts, 1)} a layer stay on the device"
    reasons = (*config.reasons, ("pipeline", how), ("experts", stay))
    if offload.cuda is None:
        return replace(config, offload=offload, reasons=reasons)
    memory_bytes = offload.cuda.memory_bytes
    where = f"{offload.cuda.name}, {format_bytes(memory_bytes)} of it: experimental, not yet tried on a GPU"
    return replace(config, offload=offload, device_memory_bytes=memory_bytes, reasons=(*reasons, ("device", where)))


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
        self.reasons: list[tuple[str, str]] = []

    def config(self) -> EngineConfig:
        device = self._device()
        self.free_bytes = self._free_bytes(device)
        cpu_isa = self._cpu_isa(device)
        max_running = _at_least_one("max_running", self.settings.max_running) or DEFAULT_MAX_RUNNING
        max_batch_tokens = _at_least_one("max_batch_tokens", self.settings.max_batch_tokens)
        max_batch_tokens = max_batch_tokens or max(DEFAULT_MAX_BATCH_TOKENS, max_running)
        self.process_bytes, self.work_bytes = self._beside_weights(cpu_isa, max_batch_tokens, max_running)
        weights = self._weights(device, can_pack=bool(cpu_isa))
        dtype = "float32" if cpu_isa else weights.matrices
        plan = self._expert_plan(weights, dtype) if cpu_isa and self.settings.memory_bytes else None
        if plan is not None and self.settings.max_batch_tokens is None:
            max_batch_tokens = self._streamed_batch_tokens(plan, max_batch_tokens, max_running)
            self.process_bytes, self.work_bytes = self._beside_weights(cpu_isa, max_batch_tokens, max_running)
        weight_bytes = self._check_weights(weights, plan)
        kv_share = self._kv_share(plan, is_limited=bool(cpu_isa and self.settings.memory_bytes))
        kv_dtype = self._kv_dtype(device, dtype, weight_bytes, kv_share)
        num_blocks, max_model_len, kv_bytes = self._kv_cache(kv_dtype, weight_bytes, max_running, kv_share)
        return EngineConfig(
            model_path=str(self.checkpoint.path),
            model_name=self.settings.model_name or self.checkpoint.path.stem,
            dtype=dtype,
            weight_format=weights.matrices,
            embedding_format=weights.embeddings,
            cpu_isa=cpu_isa,
            kv_dtype=kv_dtype,
            device=device,
            num_threads=self._num_threads(),
            scheduler=SchedulerConfig(
                block_size=BLOCK_SIZE,
                num_blocks=num_blocks,
                max_model_len=max_model_len,
                max_running=max_running,
                max_batch_tokens=max_batch_tokens,
                prefix_caching=self.settings.prefix_caching,
                num_kept_blocks=None if plan is None else self._num_kept_blocks(num_blocks, kv_bytes, kv_share),
            ),
            kv_cache_bytes=kv_bytes,
            experts=None if plan is None else self._expert_slots(plan),
            packed_file=self._packed_file(weights) if cpu_isa and plan is None else "",
            device_memory_bytes=self.settings.device_memory_bytes or 0,
            memory=self._memory_plan(weight_bytes if plan is None else plan.resident_bytes),
            record_routing=self._record_routing(),
            graph_file="" if self.settings.graph_file is None else str(self.settings.graph_file.absolute()),
            trace_file="" if self.settings.trace_file is None else str(self.settings.trace_file.absolute()),
            reasons=tuple(self.reasons),
        )

    def _device(self) -> str:
        if self.settings.device != "auto":
            try:
                device = torch.device(self.settings.device)
            except RuntimeError:
                raise ConfigError(f"device {self.settings.device!r} is unknown; use cpu or cuda") from None
            if device.type == "cuda" and self.machine.accelerator is None:
                raise _no_cuda(self.settings.device)
            return str(device)
        device_name = self.machine.accelerator or "cpu"
        self.reasons.append(
            ("device", f"{device_name}: " + ("found" if self.machine.accelerator else "no accelerator"))
        )
        return device_name

    def _record_routing(self) -> str:
        """Return the file for what routers choose. Raises: ConfigError if there are no routers."""
        file = self.settings.record_routing
        if file is not None and not self.shape.num_experts:
            raise ConfigError("this is a dense model: it has no routing to record (--record-routing)")
        return "" if file is None else str(file.absolute())

    def _free_bytes(self, device: str) -> int:
        """Return what the engine may use. Raises: CapacityError if the user allows what is not there."""
        allowed, on_device = self.settings.memory_bytes, self.settings.device_memory_bytes
        if device == "cpu":
            if on_device is not None:
                raise ConfigError(
                    "a limit of device memory (--device-memory) is set, but the processor computes: leave it away, "
                    "limit main memory (--memory), or run where torch finds a CUDA device"
                )
            have = self.machine.available_bytes
            if allowed is not None:
                have += self.machine.process_bytes  # which the limit covers, too
            return _allowed("memory", allowed, have)
        if allowed is not None:
            raise ConfigError(
                "a limit of main memory (--memory) is kept on --device cpu only: leave it away, or limit that of the "
                "device (--device-memory)"
            )
        return _allowed("device memory", on_device, self.machine.accelerator_free_bytes)

    def _beside_weights(self, cpu_isa: str, max_batch_tokens: int, max_running: int) -> tuple[int, int]:
        """Return what processes will hold, and a pass's work space; both matter to the byte only within a limit."""
        if not cpu_isa or self.settings.memory_bytes is None:
            return PROCESS_BYTES, 0
        held_bytes = planned_bytes(self.machine.process_bytes, self.shape, is_served=self.settings.is_served)
        work = work_bytes(self.shape, num_tokens=max_batch_tokens, num_sampled=max_running)
        return held_bytes + margin_bytes(is_served=self.settings.is_served), work

    def _streamed_batch_tokens(self, plan: ExpertPlan, least: int, max_running: int) -> int:
        """Return how many tokens a pass may have whose experts come from disk, of which any prompt needs nearly all."""
        left_bytes = self.free_bytes - plan.least_bytes - self.process_bytes
        for num_tokens in STREAMED_BATCH_TOKENS:
            work = work_bytes(self.shape, num_tokens=num_tokens, num_sampled=max_running)
            if num_tokens > least and work <= left_bytes // 8:
                self.reasons.append(("max_batch_tokens", f"{num_tokens}: a long prompt then reads its experts once"))
                return num_tokens
        return least

    def _kv_share(self, plan: ExpertPlan | None, *, is_limited: bool) -> float:
        """Return how much of what weights leave keys and values may take: all, if the user said what that is."""
        if plan is not None:
            return KV_SHARE_BESIDE_SLOTS
        return 1.0 if is_limited else KV_SHARE

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
        least_tokens = min(self.settings.max_model_len or self.shape.max_position, LEAST_KV_TOKENS)
        kv_dtype = dtype if self.settings.kv_dtype not in KV_DTYPES else self.settings.kv_dtype
        kv_bytes = self.settings.kv_cache_bytes or -(-least_tokens // BLOCK_SIZE) * self._kv_block_bytes(kv_dtype)
        if not self.shape.num_experts or self._left(weights) >= kv_bytes:
            return None
        return ExpertPlan.make(
            self.checkpoint,
            self.shape,
            weights,
            slab_file=self.settings.slab_file,
            cache_dir=self.settings.cache_dir,
            policy=self.settings.expert_policy,
            predictor=self.settings.predictor,
        )

    def _num_kept_blocks(self, num_blocks: int, kv_bytes: int, kv_share: float) -> int:
        """Return how many blocks stay in memory while nobody uses them: all, if the user says how much there is."""
        if self.settings.kv_cache_bytes is not None:
            return num_blocks
        most_bytes = int(kv_bytes * KV_SHARE_KEPT / kv_share)
        return max(most_bytes * num_blocks // max(kv_bytes, 1), 1)

    def _expert_slots(self, plan: ExpertPlan) -> ExpertSlotsConfig:
        """Return the slots there are while keys, values and work space need nothing."""
        config = plan.slots(self.free_bytes - plan.resident_bytes - self.process_bytes)
        self.reasons.append(("experts", plan.reason(config)))
        return config

    def _cpu_isa(self, device: str) -> str:
        """Return the instruction set of the CPU kernels; empty if torch computes."""
        if self.offloads_to_torch:
            return ""
        if device != "cpu" or not cpu.is_available():
            if device == "cpu":
                self.reasons.append(("cpu_isa", f"torch computes: {cpu.why_not()}"))
            return ""
        try:
            return cpu.best_isa(self.settings.cpu_isa)
        except ValueError as error:
            raise ConfigError(f"{error}; known are {', '.join(cpu.ISAS)}") from None

    def _weights(self, device: str, *, can_pack: bool) -> WeightChoice:
        choice = wished(self.settings.dtype, self.settings.quantize, can_pack=can_pack)
        if choice is None:
            if can_pack:
                choice = own_precision(self.checkpoint, self.shape, self._keeps_precision)
            else:
                is_cpu = device == "cpu" and not self.offloads_to_torch
                choice = for_torch(self.checkpoint, lambda it: self._left(it) >= self.free_bytes / 2, is_cpu=is_cpu)
            self.reasons.append(("weights", f"{choice.matrices}: {choice.reason}"))
        return choice

    def _keeps_precision(self, weights: WeightChoice) -> bool:
        """Say whether float32 may stay: with a memory limit, what does not fit comes from disk."""
        return self.settings.memory_bytes is not None or self._left(weights) >= 0

    def _left(self, weights: WeightChoice) -> float:
        """Return the bytes that weights and process leave; negative if they do not fit."""
        return self.free_bytes - weights.num_bytes(self.checkpoint) - self._overhead_bytes

    def _packed_file(self, weights: WeightChoice) -> str:
        """Return the slab file that all weights are mapped from; empty if there is none."""
        named = self.settings.slab_file
        formats = WeightFormats(weights.matrices, weights.embeddings)
        file = find_slab_file(self.checkpoint, formats, named, self.settings.cache_dir)
        if file is not None:
            self.reasons.append(("start", f"weights are mapped from {file}, as `moeflow pack` left them"))
        elif named is not None:
            self.reasons.append(("start", f"weights are packed anew: {named} is not there (`moeflow pack` makes it)"))
        return "" if file is None else str(file)

    def _num_threads(self) -> int:
        wish = _at_least_one("num_threads", self.settings.num_threads)
        if wish is None:
            self.reasons.append(("num_threads", f"{self.machine.num_cores}: one a core"))
        return wish or self.machine.num_cores

    def _check_weights(self, weights: WeightChoice, plan: ExpertPlan | None) -> int:
        """Return the bytes of the weights that must be in memory. Raises: CapacityError if they do not fit."""
        num_bytes = weights.num_bytes(self.checkpoint) if plan is None else plan.least_bytes
        if num_bytes + self._overhead_bytes > self.free_bytes:
            if plan is not None:
                raise CapacityError(
                    f"{format_bytes(plan.resident_bytes)} of the weights must be in memory, and {plan.least_slots} "
                    f"experts at a time: with the process that is {format_bytes(num_bytes + self._overhead_bytes)} in "
                    f"{weights.matrices}, but {format_bytes(self.free_bytes)} are allowed: raise the memory limit "
                    f"(--memory) or use {_SMALLER[weights.matrices]}"
                )
            raise CapacityError(
                f"the weights need {format_bytes(num_bytes)} in {weights.matrices} and the process "
                f"{format_bytes(self._overhead_bytes)} more, but {format_bytes(self.free_bytes)} of memory are free: "
                f"use {_SMALLER[weights.matrices]} or free memory{self._hint()}"
            )
        return num_bytes

    def _hint(self) -> str:
        can_stream = self.shape.num_experts and self.settings.memory_bytes is None and cpu.is_available()
        return "; or set a limit (--memory) and have experts come from disk" if can_stream else ""

    def _kv_dtype(self, device: str, dtype: str, weight_bytes: int, share: float) -> str:
        wish = self.settings.kv_dtype
        if wish != "auto":
            if wish not in KV_DTYPES:
                raise ConfigError(f"kv_dtype {wish!r} is unknown; use one of auto, {', '.join(KV_DTYPES)}")
            return wish
        if device != "cpu" or self.offloads_to_torch or not cpu.is_available():
            self.reasons.append(("kv_dtype", f"{dtype}: what is computed in"))
            return dtype
        budget = self.settings.kv_cache_bytes or int((self.free_bytes - weight_bytes - self._overhead_bytes) * share)
        if (self.settings.max_model_len or 0) * self._kv_block_bytes("float32") > budget * BLOCK_SIZE:
            self.reasons.append(("kv_dtype", "bfloat16: in float32 one request of max_model_len would not fit"))
            return "bfloat16"
        self.reasons.append(("kv_dtype", "float32: exact; bfloat16 holds twice the tokens, int8 about four times"))
        return "float32"

    def _kv_block_bytes(self, kv_dtype: str) -> int:
        return self.shape.kv_bytes_per_token(*KV_DTYPES[kv_dtype]) * BLOCK_SIZE

    def _kv_cache(self, kv_dtype: str, weight_bytes: int, max_running: int, share: float) -> tuple[int, int, int]:
        """Return number of blocks, longest request in tokens, and bytes of the cache."""
        block_bytes = self._kv_block_bytes(kv_dtype)
        left = self.free_bytes - weight_bytes - self._overhead_bytes
        wish_len = _at_least_one("max_model_len", self.settings.max_model_len)
        if wish_len is not None and wish_len > self.shape.max_position:
            raise ConfigError(
                f"max_model_len {wish_len} is beyond the {self.shape.max_position} tokens this model was made for"
            )
        blocks_per_request = -(-(wish_len or self.shape.max_position) // BLOCK_SIZE)
        if self.settings.kv_cache_bytes is not None:
            num_blocks = self.settings.kv_cache_bytes // block_bytes
            if self.settings.kv_cache_bytes > left:
                raise CapacityError(
                    f"a KV cache of {format_bytes(self.settings.kv_cache_bytes)} is asked for, but beside the weights "
                    f"only {format_bytes(left)} are free: ask for less"
                )
        else:
            num_blocks = min(blocks_per_request * max_running, int(left * share) // block_bytes)
            self.reasons.append(
                (
                    "kv_cache",
                    f"{format_bytes(num_blocks * block_bytes)}: {share:.0%} of what the weights leave, at most",
                )
            )
        if num_blocks < (blocks_per_request if wish_len else 1):
            raise CapacityError(
                f"one request of {wish_len or BLOCK_SIZE} tokens needs a KV cache of "
                f"{format_bytes(max(blocks_per_request if wish_len else 1, 1) * block_bytes)}, but it has "
                f"{format_bytes(num_blocks * block_bytes)}: enlarge the KV cache or lower max_model_len"
            )
        max_model_len = wish_len or min(self.shape.max_position, num_blocks * BLOCK_SIZE)
        if wish_len is None:
            limited = max_model_len < self.shape.max_position
            self.reasons.append(
                ("max_model_len", f"{max_model_len}: " + ("KV cache" if limited else "the model's context"))
            )
        return num_blocks, max_model_len, num_blocks * block_bytes


def _allowed(what: str, wish: int | None, have: int) -> int:
    """Return the limit that the user set, else what there is."""
    if wish is not None and wish > have:
        raise CapacityError(
            f"a {what} limit of {format_bytes(wish)} is asked for, but {format_bytes(have)} are free: "
            "ask for less or free memory"
        )
    return have if wish is None else wish


def _at_least_one(name: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
    return value
