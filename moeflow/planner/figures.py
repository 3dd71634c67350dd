"""What MoE-Lightning's figures 4, 5 and 10 show, for any machine and model: numbers only, drawn elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, DISK, RAM, Link, LinkRate, Machine
from moeflow.core.plan import Policy
from moeflow.planner.cost_model import CostModel
from moeflow.planner.model_costs import ModelCosts, Work
from moeflow.planner.policy_search import Aim, search
from moeflow.planner.roofline import Roofs, roofs, work_seconds

FACTORS: Final = (0.5, 1.0, 2.0, 4.0, 8.0)  # of what the machine has
MAP_RATIO: Final = 1.5  # of the search's grid: between its fine and its coarse one
MAP_SEQUENCES: Final = 8  # whose keys and values there is always room for
MEMORY_SHARES: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of what the model needs


@dataclass(frozen=True, slots=True)
class Mark:
    """A work's intensity, as a vertical line."""

    name: str
    intensity: float  # FLOP a byte of the data that lies at the far level


@dataclass(frozen=True, slots=True)
class RooflineFigure:
    """Roofs of two levels and the link between them, and where work lies under them."""

    title: str
    near: str
    far: str
    roofs: Roofs
    marks: tuple[Mark, ...]
    operating_name: str
    operating_intensity: float
    operating_flops_per_s: float  # as the cost model expects it at the level that the policy chose
    near_intensity: float = 0.0  # FLOP a byte at the near level, of one micro-batch; 0: as at the far one


@dataclass(frozen=True, slots=True)
class MapPoint:
    """The best policy for one machine of a map."""

    x: float
    y: float
    policy: Policy | None  # None: nothing fits
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class PolicyMap:
    """How the best policy changes with two properties of the machine."""

    title: str
    x_label: str
    y_label: str
    points: tuple[MapPoint, ...]
    has_device: bool


def roofline_figures(model: CostModel, policy: Policy) -> list[RooflineFigure]:
    """Return attention (figure 4) and experts (figure 5) of a decoding step under a policy."""
    near, far = (DEVICE, RAM) if model.has_device else (RAM, DISK)
    return [figure for figure in (_attention(model, policy, near, far), _experts(model, policy, near, far)) if figure]


def _attention(model: CostModel, policy: Policy, near: str, far: str) -> RooflineFigure:
    context, sequences = model.workload.mean_context, policy.micro_batch
    marks = []
    for kv_dtype in dict.fromkeys(("float32", "bfloat16", "int8", model.costs.formats.kv)):
        changed = replace(model.costs, formats=replace(model.costs.formats, kv=kv_dtype))
        marks.append(Mark(f"K and V in {kv_dtype}", changed.decode_attention(1, context).intensity))
    work = model.costs.decode_attention(sequences, context)
    at = near if policy.attention_on_device or not model.has_device else far
    title = f"attention, {context:.0f} tokens of context"
    return _figure(
        model, title, near, far, marks, (f"as planned: {sequences} sequences, {_where(at)}", work, work.intensity, at)
    )


def _experts(model: CostModel, policy: Policy, near: str, far: str) -> RooflineFigure:
    costs = model.costs
    sizes = [1, 4, 16, 64, 256, 1024] if model.has_device else [1, 8, 32, 128]
    marks = [Mark(f"batch of {size}", _ffn(costs, size).intensity) for size in sizes]
    one = _ffn(costs, policy.micro_batch)
    whole = _ffn(costs, policy.batch_size).intensity if model.has_device else one.intensity
    at = near if policy.ffn_on_device or not model.has_device else far
    figure = _figure(
        model, "experts", near, far, marks, (f"as planned: batch of {policy.batch_size}, {_where(at)}", one, whole, at)
    )
    return replace(figure, near_intensity=one.intensity) if model.has_device else figure


def _figure(
    model: CostModel, title: str, near: str, far: str, marks: Iterable[Mark], operating: tuple[str, Work, float, str]
) -> RooflineFigure:
    name, work, intensity, at = operating
    reached = work.num_flops / work_seconds(model.machine.level(at), work, model.num_devices if at == DEVICE else 1)
    if at == DEVICE:  # what has to come over the link bounds it as well (equation 7)
        reached = min(reached, model.machine.link(far, near).peak_bytes_per_s * intensity)
    over = roofs(model.machine, near, far, work.dtype)
    top = over.local(work.intensity) if at == near else over.far(work.intensity)
    reached = min(reached, top * (model.num_devices if at == DEVICE else 1))  # a kernel may beat a measured roof a bit
    return RooflineFigure(title, near, far, over, tuple(marks), name, intensity, reached)


def _where(level: str) -> str:
    return "on the device" if level == DEVICE else "on the host"


def _ffn(costs: ModelCosts, num_tokens: int) -> Work:
    return costs.experts(num_tokens) if costs.num_moe_layers else costs.dense(num_tokens)


def policy_map(model: CostModel, aim: Aim, on_point: Callable[[], None] = lambda: None) -> PolicyMap:
    """Return how the best policy changes: with link and host (figure 10), or without a device with memory and disk.

    Blocks: for some ten seconds.
    """
    xs, ys = _axes(model)
    points = []
    for y in ys:
        for x in xs:
            machine = _scaled_link_and_host(model.machine, x, y) if model.has_device else _scaled_host(model, x, y)
            points.append(_point(replace(model, machine=machine), aim, x, y))
            on_point()
    if model.has_device:
        return PolicyMap(
            "best policy", "link to the device, times as fast", "host, times as large and fast", tuple(points), True
        )
    labels = ("memory for weights, share of the model", "disk, times as fast")
    return PolicyMap("best policy", *labels, tuple(points), False)


def num_map_points(model: CostModel) -> int:
    """Return how many searches a map takes."""
    xs, ys = _axes(model)
    return len(xs) * len(ys)


def _axes(model: CostModel) -> tuple[Sequence[float], Sequence[float]]:
    return (FACTORS if model.has_device else MEMORY_SHARES), FACTORS


def _point(model: CostModel, aim: Aim, x: float, y: float) -> MapPoint:
    try:
        policy = search(model, replace(aim, memory_limits={}), MAP_RATIO)
    except CapacityError:
        return MapPoint(x, y, None, 0.0)
    return MapPoint(x, y, policy, model.predict(policy).tokens_per_s)


def _scaled_link_and_host(machine: Machine, link: float, host: float) -> Machine:
    levels = []
    for level in machine.levels:
        if level.name == RAM and level.processor is not None:
            peaks = tuple((dtype, flops * host) for dtype, flops in level.processor.peak_flops_per_s)
            processor = replace(level.processor, peak_flops_per_s=peaks)
            size, speed = int(level.capacity_bytes * host), level.read_bytes_per_s * host
            levels.append(replace(level, capacity_bytes=size, read_bytes_per_s=speed, processor=processor))
        else:
            levels.append(level)
    links = tuple(it if DISK in (it.source, it.target) else _scaled_link(it, link) for it in machine.links)
    return replace(machine, levels=tuple(levels), links=links)


def _scaled_host(model: CostModel, share: float, disk: float) -> Machine:
    size = int(
        model.process_bytes
        + model.costs.model_bytes * share
        + MAP_SEQUENCES * model.workload.max_tokens * model.costs.kv_bytes
    )
    levels = tuple(
        replace(level, capacity_bytes=size) if level.name == RAM else level for level in model.machine.levels
    )
    links = tuple(_scaled_link(it, disk) if it.source == DISK else it for it in model.machine.links)
    return replace(model.machine, levels=levels, links=links)


def _scaled_link(link: Link, factor: float) -> Link:
    rates = tuple(
        LinkRate(transfer_bytes=it.transfer_bytes, bytes_per_s=it.bytes_per_s * factor, depth=it.depth)
        for it in link.rates
    )
    return replace(link, rates=rates)
