"""From what the user overrides to a plan. Of a model only headers are read, or a bare config.

A machine with a device is planned for as MoE-Lightning does, weights in 16 bits unless the user says otherwise; this
machine and others without a device in the formats that the engine itself would choose.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from moeflow.checkpoint.checkpoint import Checkpoint
from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.cache_dir import cache_folder
from moeflow.core.errors import CapacityError, CheckpointError, ConfigError, MoeflowError
from moeflow.core.hardware import DEVICE, DISK, RAM, Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.plan import Plan, Workload
from moeflow.kernels.weight_format import WeightFormat
from moeflow.models.layers.weight_allocator import WeightFormats
from moeflow.models.registry import read_bare_config, read_model_config
from moeflow.planner.choices.expert_plan import min_slots
from moeflow.planner.choices.packed_files import find_packed_weights_file
from moeflow.planner.choices.weight_choice import WeightChoice, explicit_choice, own_precision
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import ENGINE_BYTES, margin_bytes, planned_bytes
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.estimate import HOST_OVERLAP, HOST_PREFILL_OVERLAP, RENEW
from moeflow.planner.hardware.disk_rates import file_link
from moeflow.planner.hardware.host import measure_machine
from moeflow.planner.hardware.kernel_bench import shapes_of
from moeflow.planner.hardware.machine_files import load_machine
from moeflow.planner.hardware.this_machine import how_measured, this_machine, was_disturbed
from moeflow.planner.known_routing import known_routing
from moeflow.planner.model_files import shipped_models
from moeflow.planner.plan_maker import make_plan
from moeflow.planner.policy_search import COARSE, MAX_SEQUENCES, Objective, cost_per_token, search
from moeflow.planner.settings import (
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    DISK_NUM_BATCHED_TOKENS,
    Settings,
)

TIE = 1e-3  # what a second until the first token counts beside what the goal asks for
MAX_SEQUENCES_ON_HOST = 256  # beyond, a step of a host is bound by arithmetic and answers only come later


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for. `settings` says model, formats and limits."""

    settings: Settings
    workload: Workload
    goal: str = "throughput"
    machine: str | None = None  # a name or a file; None: this one
    recalibrate: bool = False  # measure this machine again
    num_sequences: int | None = None  # that decode together; None: as many as is best
    num_requests: int | None = None  # there are no more of them
    routing: RoutingProfile | None = None  # None: what was learnt of this model, or even routing


@dataclass(frozen=True)
class Planned:
    """A plan, and the costs that it was made with."""

    plan: Plan
    model: CostModel
    objective: Objective


def plan_for(request: PlanRequest, on_step: Callable[[str], None] = lambda _: None) -> Planned:
    """Return the best plan for a request.

    Blocks: for some seconds, more if this machine is measured first.
    Raises: CapacityError if nothing fits; CheckpointError, ConfigError.
    """
    settings = request.settings
    if settings.model is None:
        raise ConfigError("no model is named")
    _check_device(request)
    _check_threads(settings, measure_machine().num_cores)
    machine = None if request.machine is None else load_machine(request.machine)
    costs, reason = _look_at(settings, has_device=machine is not None and machine.has(DEVICE))
    _check_lengths(request, costs.shape)
    if request.routing is None and _has_weights(settings):
        request = dataclasses.replace(request, routing=known_routing(str(settings.model), settings.cache_dir))
    if machine is None:
        machine = _measured_here(request, costs, on_step)
    on_step("the best policy")
    has_device = machine.has(DEVICE)
    most = request.num_requests or request.num_sequences or (MAX_SEQUENCES if has_device else MAX_SEQUENCES_ON_HOST)
    objective = Objective(
        goal=request.goal,
        num_sequences=request.num_sequences,
        max_sequences=most,
        memory_limits={} if settings.memory_bytes is None else {RAM: settings.memory_bytes},
    )
    model = _cost_model(request, machine, costs, settings.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS)
    if settings.max_num_batched_tokens is None and not has_device and objective.memory_limits:
        model = _with_best_chunk(
            model, objective, [_cost_model(request, machine, costs, it) for it in DISK_NUM_BATCHED_TOKENS]
        )
    with _cautious(machine):
        plan = make_plan(model, objective, model_name=_name(settings), reasons=_reasons(machine, reason))
    if request.machine is None:
        plan = dataclasses.replace(plan, num_threads=settings.num_threads or measure_machine().num_cores)
    return Planned(plan, model, objective)


def _cost_model(request: PlanRequest, machine: Machine, costs: ModelCosts, chunk_tokens: int) -> CostModel:
    has_device = machine.has(DEVICE)
    return CostModel(
        machine,
        costs,
        request.workload,
        routing=request.routing or EVEN_ROUTING,
        overlap=1.0 if has_device else HOST_OVERLAP,
        prefill_overlap=1.0 if has_device else HOST_PREFILL_OVERLAP,
        process_bytes=_process_bytes(costs.shape, request.settings, chunk_tokens),
        min_experts=0.0 if has_device else _min_experts(costs),
        chunk_tokens=chunk_tokens,
    )


def _with_best_chunk(model: CostModel, objective: Objective, others: Sequence[CostModel]) -> CostModel:
    """Return the costs with so many tokens a pass as is best, where experts may come from disk for each pass.

    The more a pass has, the fewer experts there is room for beside its work.
    """
    found = []
    for one in (model, *others):
        try:
            policy = search(one, objective, COARSE)
        except CapacityError:
            continue
        found.append((cost_per_token(one, policy, objective.goal) + one.predict(policy).first_token_s * TIE, one))
    return min(found, key=lambda pair: pair[0])[1] if found else model


def _reasons(machine: Machine, weight_format: str) -> tuple[tuple[str, str], ...]:
    how = how_measured(machine)
    return (("weight_format", weight_format), *([("machine", how)] if how else []))


@contextmanager
def _cautious(machine: Machine) -> Iterator[None]:
    """Have a refusal name the measurements that it rests on, if they were disturbed."""
    try:
        yield
    except CapacityError as error:
        if not was_disturbed(machine):
            raise
        raise CapacityError(f"{error}. This machine was {how_measured(machine)}: {RENEW}") from error


def _name(settings: Settings) -> str:
    """Return what a plan calls the model: a shipped shape's name, or where it is."""
    return str(settings.model) if settings.model in shipped_models() else str(Path(str(settings.model)).absolute())


def _measured_here(request: PlanRequest, costs: ModelCosts, on_step: Callable[[str], None]) -> Machine:
    """Return this machine. Blocks: for some seconds if it was never measured, or not for such a model."""
    settings, here = request.settings, measure_machine()
    folder = cache_folder(settings.cache_dir)
    machine = this_machine(
        folder,
        num_threads=settings.num_threads or here.num_cores,
        ram_bytes=here.available_bytes,
        shapes=shapes_of(costs),
        recalibrate=request.recalibrate,
        on_step=on_step,
    )
    packed = _packed_file(settings, costs)
    room = max(shutil.disk_usage(folder).free + (packed.stat().st_size if packed is not None else 0), 1)
    levels = tuple(dataclasses.replace(it, capacity_bytes=room) if it.name == DISK else it for it in machine.levels)
    machine = dataclasses.replace(machine, levels=levels)
    is_too_small = costs.model_bytes > (settings.memory_bytes or here.available_bytes)
    if packed is None or not is_too_small:
        return machine
    on_step("how fast the packed weights is read")  # which may lie on another disk than the folder, or less well
    link = file_link(packed)
    if link is None:
        return machine
    return dataclasses.replace(machine, links=(*(it for it in machine.links if it.source != DISK), link))


def _has_weights(settings: Settings) -> bool:
    """Say whether the model is a checkpoint, not a shape alone."""
    return settings.model is not None and Path(settings.model).exists() and not settings.model.endswith(".json")


def _packed_file(settings: Settings, costs: ModelCosts) -> Path | None:
    """Return the packed weights that is on disk already; None: it has yet to be made, or cannot be used."""
    if not _has_weights(settings):
        return None
    names = (costs.formats.matrices, costs.formats.embeddings, costs.formats.of_routers)
    matrices, embeddings, routers = (cast(WeightFormat, name) for name in names)
    formats = WeightFormats(matrices, embeddings, routers)
    try:
        with closing(open_checkpoint(str(settings.model))) as checkpoint:
            return find_packed_weights_file(checkpoint, formats, settings.packed_weights_file, settings.cache_dir)
    except MoeflowError:  # making it will say why
        return None


def _check_device(request: PlanRequest) -> None:
    """Raises: ConfigError for a device that cannot be planned for."""
    if request.settings.device not in ("auto", "cpu"):
        raise ConfigError(
            f"--device {request.settings.device} cannot be planned for: this machine's processor and disk are "
            "measured, a device of it is not. Plan for a described one (--machine t4, or a file)"
        )


def _check_lengths(request: PlanRequest, shape: ModelConfig) -> None:
    """Raises: ConfigError if a request would be longer than the model's context."""
    workload = request.workload
    if workload.max_tokens > shape.max_position:
        raise ConfigError(
            f"a prompt of {workload.max_prompt_len} tokens and an answer of {workload.gen_len} are "
            f"{workload.max_tokens} together, but {request.settings.model} was made for {shape.max_position} at most: "
            "plan for shorter prompts (--prompt-len, --prompts) or answers (--gen-len)"
        )


def _check_threads(settings: Settings, num_cores: int) -> None:
    """Raises: ConfigError if more threads are to be planned for than there are cores."""
    if (settings.num_threads or 0) > num_cores:
        raise ConfigError(
            f"{settings.num_threads} threads (--threads) are asked for, but this machine has {num_cores} cores, and "
            f"kernels wait for each other: say at most {num_cores}"
        )


def _look_at(settings: Settings, *, has_device: bool) -> tuple[ModelCosts, str]:
    """Return a model's costs in the formats to use, and why these."""
    assert settings.model is not None, "a model is named"
    choice = explicit_choice(settings.dtype, settings.quantize, can_pack=True)
    shipped = shipped_models()
    bare = shipped.get(settings.model) or (Path(settings.model) if settings.model.endswith(".json") else None)
    if bare is not None:
        shape, own = read_bare_config(bare), WeightChoice("bfloat16", "bfloat16", "as such models are published")
        chosen = _for(choice, own, has_device=has_device)
        chosen = dataclasses.replace(chosen, routers="bfloat16" if chosen.matrices == "bfloat16" else "float32")
    else:
        with closing(_opened(settings.model)) as checkpoint:
            shape = read_model_config(checkpoint)
            own = own_precision(checkpoint, lambda _: True)
            chosen = _for(choice, own, has_device=has_device).with_routers(checkpoint)
    return ModelCosts(shape, _formats(shape, chosen, settings, has_device=has_device)), chosen.reason or "as asked for"


def _for(choice: WeightChoice | None, own: WeightChoice, *, has_device: bool) -> WeightChoice:
    """Return what the user said, or else the model's own formats, as far as a device computes in them."""
    if has_device and own.matrices == "float32" and choice is None:
        return WeightChoice("bfloat16", "bfloat16", "devices compute in 16 bits")
    return choice or own


def _opened(model: str) -> Checkpoint:
    """Return a checkpoint. Raises: CheckpointError, which names what else can be planned for."""
    try:
        return open_checkpoint(model)
    except CheckpointError as error:
        path, remedy = Path(model), error.remedy
        if (path / "config.json").is_file():
            remedy += f"; to plan for its shape alone, say `moeflow plan {path / 'config.json'}`"
        elif not path.exists():
            remedy += f"; shapes that can be planned for without weights are {', '.join(shipped_models())}"
        raise CheckpointError(error.problem, file=error.file, tensor=error.tensor, remedy=remedy) from None


def _process_bytes(shape: ModelConfig, settings: Settings, chunk_tokens: int) -> int:
    """Return what an engine takes that is neither weights nor keys and values."""
    processes = planned_bytes(ENGINE_BYTES, shape, is_served=settings.is_served)
    num_sampled = settings.max_num_seqs or DEFAULT_MAX_NUM_SEQS
    margin = 0 if settings.memory_bytes is None else margin_bytes(is_served=settings.is_served)
    return processes + margin + work_bytes(shape, num_tokens=chunk_tokens, num_sampled=num_sampled)


def _min_experts(costs: ModelCosts) -> float:
    """Return the share of experts without which the engine computes no pass."""
    num_experts = costs.num_moe_layers * costs.shape.num_experts
    return min(min_slots(costs.shape) / num_experts, 1.0) if num_experts else 0.0


def _formats(shape: ModelConfig, chosen: WeightChoice, settings: Settings, *, has_device: bool) -> Formats:
    kv_dtype = settings.kv_dtype if settings.kv_dtype != "auto" else "bfloat16" if has_device else "float32"
    return Formats(
        matrices=chosen.matrices,
        embeddings=chosen.embeddings,
        kv=kv_dtype,
        activation_bytes=2 if has_device else 4,
        routers=chosen.routers,
    )
