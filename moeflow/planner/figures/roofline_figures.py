"""What MoE-Lightning's figures 4 and 5 show, for any machine, model and policy. Numbers only, drawn elsewhere.

Considers two levels: the near one (i), where a pass computes, and the far one (j), which is larger. An operational
intensity (FLOP/byte) belongs to a level. The near one counts bytes read there, the far one bytes that really come from
there. What stays on the near level comes from nowhere, and no link bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeflow.core.hardware import DEVICE, DISK, RAM, Link
from moeflow.core.plan import Policy
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy
from moeflow.planner.costs.model_costs import KernelWork
from moeflow.planner.costs.roofline import Roofs, roofs, work_seconds
from moeflow.planner.forecast import expert_places


@dataclass(frozen=True, slots=True)
class Mark:
    """A work's intensity on the far level if all that it reads came from there."""

    name: str
    intensity: float


@dataclass(frozen=True, slots=True)
class Turn:
    """A point where another resource begins to bound."""

    name: str  # "P1"
    meaning: str
    intensity: float  # on the far level
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Operating:
    """Where the planned work lies: a layer of the whole batch."""

    name: str
    flops_per_s: float  # as the cost model expects it
    near_intensity: float | None  # None: the far level computes it
    far_intensity: float | None  # None: nothing comes from there


@dataclass(frozen=True, slots=True)
class RooflineFigure:
    """Roofs of two levels and the link between them, and where work lies under them."""

    title: str
    near: str
    far: str
    roofs: Roofs
    marks: tuple[Mark, ...]
    turns: tuple[Turn, ...]
    operating: Operating


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planned:
    """A layer's work as planned: one of its micro-batches, their number, and the bytes from the far level."""

    name: str
    work: KernelWork
    times: int
    level: str  # where it is computed
    streamed_bytes: float  # for all micro-batches combined
    stream_s: float


def roofline_figures(model: CostModel, policy: Policy) -> list[RooflineFigure]:
    """Return attention (figure 4) and experts (figure 5) of a decoding step under a policy."""
    context = model.workload.mean_context
    attention = _figure(
        model, f"attention, {context:.0f} tokens of context", _kv_marks(model, context), _attention(model, policy)
    )
    kind = "experts" if model.costs.num_moe_layers else "feed-forward network"
    return [attention, _figure(model, kind, _batch_marks(model), _feed_forward(model, policy))]


def _levels(model: CostModel) -> tuple[str, str]:
    return (DEVICE, RAM) if model.has_device else (RAM, DISK)


def _kv_marks(model: CostModel, context: float) -> Iterator[Mark]:
    for kv_dtype in dict.fromkeys(("float32", "bfloat16", "int8", model.costs.formats.kv)):
        changed = replace(model.costs, formats=replace(model.costs.formats, kv=kv_dtype))
        yield Mark(f"K and V in {kv_dtype}", changed.decode_attention(1, context).intensity)


def _batch_marks(model: CostModel) -> Iterator[Mark]:
    for size in (1, 4, 16, 64, 256, 1024) if model.has_device else (1, 8, 32, 128):
        yield Mark(f"batch of {size}", _ffn(model, size).intensity)


def _attention(model: CostModel, policy: Policy) -> _Planned:
    """Return attention: keys and values that are not on the device come to it, unless the host attends."""
    number = policy.num_micro_batches if model.has_device else 1
    size = policy.micro_batch if model.has_device else policy.batch_size
    work = model.costs.decode_attention(size, model.workload.mean_context)
    where, streamed = _levels(model)[0], 0.0
    if model.has_device and policy.attention_on_device:
        streamed = (1 - policy.kv_on_device) * work.num_bytes * number
    elif model.has_device:
        where = RAM
    link = model.machine.link(RAM, DEVICE) if model.has_device else None
    return _Planned(
        name=f"as planned: {policy.batch_size} sequences, {_where(model, where)}",
        work=work,
        times=number,
        level=where,
        streamed_bytes=streamed,
        stream_s=_link_s(model, link, streamed, work.num_bytes) if link is not None else 0.0,
    )


def _feed_forward(model: CostModel, policy: Policy) -> _Planned:
    """Return experts, or a dense model's network: the part that is not on the near level comes to it for each step."""
    costs, choice = model.costs, IntegerPolicy.of(policy)
    name = f"as planned: batch of {policy.batch_size}"
    if not model.has_device:
        distinct = model.reads(choice)[0].distinct if costs.num_moe_layers else None
        work = costs.experts(policy.batch_size, distinct) if costs.num_moe_layers else costs.dense(policy.batch_size)
        streamed = model.num_read(policy)[0] * costs.expert_bytes / max(costs.num_moe_layers, 1)
        seconds = model.predict(policy).busy["disk"] / max(costs.num_moe_layers, 1)
        return _Planned(name=name, work=work, times=1, level=RAM, streamed_bytes=streamed, stream_s=seconds)
    all_bytes = _ffn_bytes(model)
    streamed = (1 - _share_on_device(model, policy) - policy.experts_on_host) * all_bytes
    page = costs.layers_bytes / costs.shape.num_layers / policy.num_micro_batches
    return _Planned(
        name=f"{name} in micro-batches of {policy.micro_batch}" if policy.num_micro_batches > 1 else name,
        work=_ffn(model, policy.micro_batch),
        times=policy.num_micro_batches,
        level=DEVICE,
        streamed_bytes=streamed,
        stream_s=_link_s(model, model.weight_link, streamed, page),
    )


def _figure(model: CostModel, title: str, marks: Iterator[Mark], planned: _Planned) -> RooflineFigure:
    near, far = _levels(model)
    over = _roofs(model, planned.work.dtype)
    flops, at_near = planned.work.num_flops * planned.times, planned.level == near
    devices = model.num_devices if planned.level == DEVICE else 1
    compute_s = work_seconds(model.machine.level(planned.level), planned.work, devices) * planned.times
    seconds = model.combine({"compute": compute_s, "stream": planned.stream_s}, model.overlap)
    intensity = planned.work.intensity
    top = over.local(intensity) if at_near else over.far(intensity)  # a kernel may beat a measured roof a bit
    streamed = flops / planned.streamed_bytes if planned.streamed_bytes else None
    operating = Operating(
        name=planned.name,
        flops_per_s=min(flops / seconds, top),
        near_intensity=intensity if at_near else None,
        far_intensity=streamed if at_near else intensity,
    )
    return RooflineFigure(title, near, far, over, tuple(marks), tuple(turns(over, intensity)), operating)


def turns(over: Roofs, near_intensity: float) -> Iterator[Turn]:
    """Yield the turning points and the balance point, for work of an intensity on the near level."""
    first = over.turning_point_1
    if first:
        meaning = "left of it, computing where the data lies beats fetching it (eq. 9)"
        yield Turn("P1", meaning, first, over.far_peak)
    second, balance = over.turning_point_2(near_intensity), over.balance(near_intensity)
    bounded = "left of it, what comes from there bounds (eq. 10)"
    if balance > second:  # the near level's memory is faster than it computes
        yield Turn("P2", bounded, second, over.local(near_intensity))
        return
    meaning = f"{bounded}; at it, that and the near memory are equally busy (eq. 11)"
    yield Turn("P2 = balance", meaning, balance, over.local(near_intensity))


def _roofs(model: CostModel, dtype: str) -> Roofs:
    """Return the roofs; several devices multiply the rates of reading, computing and their own links."""
    near, far = _levels(model)
    one = roofs(model.machine, near, far, dtype)
    if near != DEVICE:
        return one
    width = 1 if model.machine.link(far, near).is_shared else model.num_devices
    return replace(
        one, peak=one.peak * model.num_devices, bandwidth=one.bandwidth * model.num_devices, link=one.link * width
    )


def _link_s(model: CostModel, link: Link, num_bytes: float, transfer_bytes: float) -> float:
    width = 1 if link.is_shared else model.num_devices
    return link.seconds(num_bytes / width, transfer_bytes / width)


def _where(model: CostModel, level: str) -> str:
    return "on the device" if level == DEVICE else "on the host" if model.has_device else "in memory"


def _ffn(model: CostModel, num_tokens: int) -> KernelWork:
    return model.costs.experts(num_tokens) if model.costs.num_moe_layers else model.costs.dense(num_tokens)


def _ffn_bytes(model: CostModel) -> float:
    """Return a layer's experts, or its network."""
    costs = model.costs
    return costs.experts_bytes / costs.num_moe_layers if costs.num_moe_layers else costs.dense(1).num_bytes


def _share_on_device(model: CostModel, policy: Policy) -> float:
    """Return which share of that stays on the device; what else a layer has stays there first."""
    if model.costs.num_moe_layers:
        return dict(expert_places(model, policy))[DEVICE]
    all_bytes = _ffn_bytes(model) * model.costs.num_dense_layers
    others = model.costs.layers_bytes - all_bytes
    return max(policy.weights_on_device * model.costs.layers_bytes - others, 0.0) / all_bytes
