"""From costs to a plan: the best policy, what it is expected to bring, what bounds it, and what would help.

What would help is found by planning anew with each resource doubled, on a coarser grid and beside the same without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import ceil
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, PINNED, RAM, Link, LinkRate, Machine, MemoryLevel
from moeflow.core.plan import DISK_OFFLOAD, RESIDENT, Estimate, Plan, Policy, Sensitivity, TierUse
from moeflow.kernels.weight_format import BITS_PER_VALUE
from moeflow.planner.costs.cost_model import BLOCK_TOKENS, CostModel, IntegerPolicy, Prediction
from moeflow.planner.policy_search import COARSE, FINE, Objective, cost_per_token, search

DISK_UNCERTAINTY: Final = 0.3  # what hits the expert cache depends on the text
MEMORY_UNCERTAINTY: Final = 0.05
MORE_MEMORY: Final = "twice the memory"
MIN_HELP: Final = 1.02  # that is worth mentioning


@dataclass(frozen=True, slots=True)
class Perturbation:
    """A resource that there could be more of."""

    change: str  # "RAM read twice as fast"
    bottleneck: str  # "reading from RAM"; empty: nothing that takes time
    turn: Callable[[Machine], Machine]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best policy, and what it means."""

    policy: Policy
    prediction: Prediction
    pipeline: str
    uncertainty: float  # of the prediction, relative
    bottleneck: str
    helps: tuple[Sensitivity, ...]


def make_plan(
    model: CostModel, objective: Objective, *, model_name: str, reasons: tuple[tuple[str, str], ...] = ()
) -> Plan:
    """Return the plan for a goal. Raises: CapacityError if nothing fits, or the rate cannot be reached."""
    model, policy = best_policy(model, objective)
    uncertainty = model.machine.uncertainty
    if policy.experts_on_disk:
        uncertainty = max(uncertainty, DISK_UNCERTAINTY)
    found = SearchResult(
        policy=policy,
        prediction=model.predict(policy),
        pipeline=pipeline_of(model, policy),
        uncertainty=uncertainty,
        bottleneck=bottleneck(model, policy),
        helps=helps(model, objective),
    )
    return describe(model, objective, found, model_name=model_name, reasons=(*reasons, *why(model, objective, policy)))


def describe(
    model: CostModel,
    objective: Objective,
    found: SearchResult,
    *,
    model_name: str,
    reasons: tuple[tuple[str, str], ...],
) -> Plan:
    """Return what was found as a plan."""
    costs, workload, policy, prediction = model.costs, model.workload, found.policy, found.prediction
    uncertainty = found.uncertainty
    num_prompt_tokens = policy.batch_size * workload.prompt_len
    tokens = policy.batch_size * ceil(workload.max_tokens / BLOCK_TOKENS) * BLOCK_TOKENS
    levels = {level.name: level.capacity_bytes for level in model.machine.levels}
    return Plan(
        model=model_name,
        machine=model.machine.name,
        goal=objective.goal,
        workload=workload,
        weight_format=costs.formats.matrices,
        embedding_format=costs.formats.embeddings,
        kv_dtype=costs.formats.kv,
        policy=policy,
        pipeline=found.pipeline,
        kv_cache_bytes=ceil(tokens * costs.kv_bytes),
        memory_bytes=objective.memory_limits.get(RAM, 0),
        prefill_tokens_per_s=Estimate.within(num_prompt_tokens / prediction.prefill_s, uncertainty),
        decode_tokens_per_s=Estimate.within(policy.batch_size / prediction.decode_s, uncertainty),
        tokens_per_s=Estimate.within(prediction.tokens_per_s, uncertainty),
        time_to_first_token_s=Estimate.within(prediction.first_token_s, uncertainty),
        time_per_token_s=Estimate.within(prediction.decode_s, uncertainty),
        memory=tuple(
            TierUse(
                tier=tier,
                peak_bytes=_peak(num_bytes, min(levels[tier], objective.memory_limits.get(tier, levels[tier]))),
                capacity_bytes=min(levels[tier], objective.memory_limits.get(tier, levels[tier])),
            )
            for tier, num_bytes in prediction.memory.items()
            if tier in levels and num_bytes > 0
        ),
        bottleneck=found.bottleneck,
        busy=tuple((name, round(seconds / prediction.decode_s, 4)) for name, seconds in prediction.busy.items()),
        helps=found.helps,
        reasons=reasons,
        machine_identity=model.machine.identity,
        expert_places=expert_places(model, policy),
    )


def expert_places(model: CostModel, policy: Policy) -> tuple[tuple[str, float], ...]:
    """Return which share of the experts lives where: (tier, share), together 1; nothing for a model without any.

    What else a layer has takes the device's memory first, as all tokens need it.
    """
    costs = model.costs
    if not costs.experts_bytes:
        return ()
    on_device = 0.0
    if model.has_device:
        others = costs.layers_bytes - costs.experts_bytes
        on_device = max(policy.weights_on_device * costs.layers_bytes - others, 0.0) / costs.experts_bytes
        on_device = min(on_device, 1 - policy.experts_on_disk)
    shares = {DEVICE: on_device, RAM: 1 - on_device - policy.experts_on_disk, DISK: policy.experts_on_disk}
    present = {level.name for level in model.machine.levels}
    return tuple((tier, max(round(share, 6), 0.0)) for tier, share in shares.items() if tier in present)


def _peak(num_bytes: float, capacity: int) -> Estimate:
    """Return an interval that ends where the memory does, which whoever runs the plan keeps to."""
    estimate = Estimate.within(num_bytes, MEMORY_UNCERTAINTY)
    return replace(estimate, high=max(min(estimate.high, capacity), num_bytes))


def pipeline_of(model: CostModel, policy: Policy) -> str:
    """Return the name of the pipeline that carries out a policy (MoE-Lightning 4.1)."""
    if not model.has_device:
        return DISK_OFFLOAD if policy.experts_on_disk else RESIDENT
    if not policy.attention_on_device:
        return "cgopipe"
    if policy.kv_on_device < 1:
        return "flexgen"  # S4: keys and values are fetched for each micro-batch
    return RESIDENT if policy.weights_on_device == 1 else "zero-inference"


def bottleneck(model: CostModel, policy: Policy) -> str:
    """Return the resource of which twice as much would make this very policy's steps shortest, or those together."""
    return bottleneck_by(lambda it: it.predict(policy).decode_s, model)


def bottleneck_by(step_s: Callable[[CostModel], float], model: CostModel) -> str:
    """Return the same, where `step_s` says how long a step is with other costs.

    Several are named where each is as busy as the others, so that none of them alone would help.
    """
    before = step_s(model)
    timed = [perturbation for perturbation in _perturbations(model) if perturbation.bottleneck]

    def gain(perturbations: Sequence[Perturbation]) -> float:
        return before / step_s(reduce(_turned, perturbations, model))

    best = max(timed, key=lambda perturbation: gain([perturbation]))
    if gain([best]) > MIN_HELP:
        return best.bottleneck
    needed = timed
    if gain(needed) <= MIN_HELP:
        return "the time between kernels"
    for perturbation in sorted(timed, key=lambda it: gain([it])):
        others = [it for it in needed if it is not perturbation]
        needed = others if gain(others) > MIN_HELP else needed
    return f"{_listed([perturbation.bottleneck for perturbation in needed])} together"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"


def helps(model: CostModel, objective: Objective) -> tuple[Sensitivity, ...]:
    """Return what twice as much of a resource, or a smaller format, would bring; best first."""
    return helps_by(_cost, model, objective)


def helps_by(
    cost: Callable[[CostModel, Objective], float], model: CostModel, objective: Objective
) -> tuple[Sensitivity, ...]:
    """Return the same, where `cost` says what the best policy costs, or raises a CapacityError."""
    try:
        before = cost(model, objective)
    except CapacityError:  # fits only between the points of the coarse grid
        return ()
    changes = {perturbation.change: _turned(model, perturbation) for perturbation in _perturbations(model)} | dict(
        _smaller_formats(model)
    )
    doubled = {tier: size * (2 if tier == RAM else 1) for tier, size in objective.memory_limits.items()}
    found = []
    for change, changed in changes.items():
        relaxed = replace(objective, memory_limits=doubled) if change == MORE_MEMORY else objective
        try:
            speedup = before / cost(changed, relaxed)
        except CapacityError:
            continue
        if speedup >= MIN_HELP:
            found.append(Sensitivity(change=change, speedup=round(speedup, 3)))
    return tuple(sorted(found, key=lambda help_: -help_.speedup))


def _cost(model: CostModel, objective: Objective) -> float:
    timed = replace(objective, goal="throughput") if objective.goal == "memory" else objective
    return cost_per_token(*best_policy(model, timed, COARSE), timed.goal)


def best_policy(model: CostModel, objective: Objective, ratio: float = FINE) -> tuple[CostModel, Policy]:
    """Return the best policy with one device, or with all of them, and the costs that it was found with.

    `ratio` is that of `search`. Raises: CapacityError if nothing fits, or the rate cannot be reached.
    """
    found: list[tuple[float, CostModel, Policy]] = []
    missing: CapacityError | None = None
    for num_devices in sorted({1, max(model.machine.num_devices, 1)}):
        shared = replace(model, num_devices=num_devices)
        try:
            policy = _for_rate(shared, objective, ratio)
        except CapacityError as error:
            missing = error
            continue
        found.append((cost_per_token(shared, policy, objective.goal), shared, policy))
    if not found:
        assert missing is not None, "some number of devices was tried"
        raise missing
    return min(found, key=lambda one: one[0])[1:]


def planned_policy(model: CostModel, objective: Objective) -> tuple[Policy, Prediction]:
    """Return the policy that `make_plan` plans, and what it brings. Raises: CapacityError as `best_policy`."""
    model, policy = best_policy(model, objective)
    return policy, model.predict(policy)


def _for_rate(model: CostModel, objective: Objective, ratio: float) -> Policy:
    """Return the best policy; for latency under a rate of arrivals, with the fewest sequences that keep up with it."""
    rate = model.workload.rate
    if objective.goal != "latency" or not rate or objective.num_sequences is not None:
        only_one = objective.goal == "latency" and objective.num_sequences is None
        return search(model, replace(objective, num_sequences=1) if only_one else objective, ratio)
    num_sequences, best = 1, 0.0
    while num_sequences <= objective.max_sequences:
        try:
            policy = search(model, replace(objective, num_sequences=num_sequences), ratio)
        except CapacityError:
            if not best:
                raise
            break
        served = model.predict(policy).tokens_per_s / model.workload.gen_len
        if served >= rate:
            return policy
        best, num_sequences = max(best, served), ceil(num_sequences * 1.5)
    raise too_slow(rate, best)


def too_slow(rate: float, best: float) -> CapacityError:
    """Return what to say where requests arrive faster than any plan answers them."""
    return CapacityError(
        f"{rate:g} requests a second are asked for, but this machine answers {best:.3g}: take shorter prompts or "
        "answers, a smaller weight format (--quantize), a smaller model or a faster machine"
    )


def _turned(model: CostModel, perturbation: Perturbation) -> CostModel:
    return replace(model, machine=perturbation.turn(model.machine))


def _perturbations(model: CostModel) -> Iterator[Perturbation]:
    yield Perturbation("RAM that is read twice as fast", "reading from RAM", lambda it: _faster_memory(it, RAM))
    yield Perturbation("a processor that computes twice as fast", "arithmetic", lambda it: _faster_processor(it, RAM))
    yield Perturbation(MORE_MEMORY, "", lambda it: _larger(it, RAM))
    if model.machine.has(DISK):
        yield Perturbation("a disk that is read twice as fast", "reading from disk", lambda it: _faster_link(it, DISK))
    if model.has_device:
        yield Perturbation(
            "device memory that is read twice as fast",
            "reading from device memory",
            lambda it: _faster_memory(it, DEVICE),
        )
        yield Perturbation(
            "a device that computes twice as fast", "arithmetic on the device", lambda it: _faster_processor(it, DEVICE)
        )
        yield Perturbation("twice the device memory", "", lambda it: _larger(it, DEVICE))
        yield Perturbation(
            "a link to the device twice as fast", "the link to the device", lambda it: _faster_link(it, RAM)
        )


def _smaller_formats(model: CostModel) -> Iterator[tuple[str, CostModel]]:
    formats = model.costs.formats
    bits = BITS_PER_VALUE.get(formats.matrices, 16.0)
    for smaller in ("int8", "int4"):
        if BITS_PER_VALUE[smaller] < bits:
            changed = replace(formats, matrices=smaller, embeddings="int8")
            yield (
                f"weights in {smaller} (--quantize {smaller})",
                replace(model, costs=replace(model.costs, formats=changed)),
            )


def _with_level(machine: Machine, name: str, change: Callable[[MemoryLevel], MemoryLevel]) -> Machine:
    levels = tuple(change(level) if level.name == name else level for level in machine.levels)
    return replace(machine, levels=levels)


def _larger(machine: Machine, name: str) -> Machine:
    larger = _with_level(machine, name, lambda level: replace(level, capacity_bytes=2 * level.capacity_bytes))
    return (
        larger
        if name != RAM
        else _with_level(larger, PINNED, lambda it: replace(it, capacity_bytes=2 * it.capacity_bytes))
    )


def _faster_memory(machine: Machine, name: str) -> Machine:
    return _with_level(machine, name, lambda level: replace(level, read_bytes_per_s=2 * level.read_bytes_per_s))


def _faster_processor(machine: Machine, name: str) -> Machine:
    def faster(level: MemoryLevel) -> MemoryLevel:
        processor = level.processor
        assert processor is not None, "a level that computes"
        peaks = tuple((dtype, 2 * flops) for dtype, flops in processor.peak_flops_per_s)
        halves = {name: getattr(processor, name) / 2 for name in ("launch_s", "pass_s", "token_s")}
        return replace(level, processor=dataclasses.replace(processor, peak_flops_per_s=peaks, **halves))

    return _with_level(machine, name, faster)


def _faster_link(machine: Machine, source: str) -> Machine:
    """Double the links from a level, from RAM also those by way of pinned memory and back."""
    sources = {source} if source == DISK else {RAM, PINNED, DEVICE}

    def faster(link: Link) -> Link:
        rates = tuple(
            LinkRate(transfer_bytes=it.transfer_bytes, bytes_per_s=2 * it.bytes_per_s, depth=it.depth)
            for it in link.rates
        )
        return replace(link, rates=rates) if link.source in sources else link

    return replace(machine, links=tuple(faster(link) for link in machine.links))


def why(model: CostModel, objective: Objective, policy: Policy) -> Iterator[tuple[str, str]]:
    """Yield the reasons for a policy: (field, why)."""
    whys = {
        "throughput": "most tokens a second for this workload",
        "latency": "as few as are waited for: each more makes every step longer",
        "memory": "least memory at nearly the best speed",
    }
    yield "batch_size", f"{policy.batch_size}: {whys[objective.goal]}"
    if model.has_device:
        far = "faster than fetching keys and values"
        yield "attention_on_device", "faster there" if policy.attention_on_device else far
        yield "weights_on_device", "what the device has room for beside the batch"
        yield "num_devices", f"{policy.num_devices} of {model.machine.num_devices}"
    if policy.experts_on_disk:
        yield "experts_on_disk", f"they have no room; {_how_often(model, policy)}"


def _how_often(model: CostModel, policy: Policy) -> str:
    """Say how often experts that have no room are read, and how that is known."""
    if model.has_device:
        return "all are read for each step"
    reads, _ = model.reads(IntegerPolicy.of(policy))
    missing = reads.num_read(policy.experts_on_disk) / (reads.num_layers * reads.distinct)
    if not model.routing.decode:
        return f"{missing:.0%} of a step's are read if routers choose evenly (`moeflow pack` learns how they do)"
    return f"{missing:.0%} of the {reads.distinct:.0f} a layer that a step uses are read"
