"""A model and machines that tests plan for."""

from __future__ import annotations

from moeflow.core.hardware import Link, LinkRate, Machine, MemoryLevel, Processor
from moeflow.core.plan import Workload
from moeflow.planner.costs.cost_model import CostModel
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.routing_profile import PassReads, RoutingProfile
from tests.shapes import MIXTRAL

SMALL = MIXTRAL.with_fields(
    vocab_size=1000,
    hidden_size=512,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=512,
)
HALF = Formats(matrices="bfloat16", embeddings="bfloat16", kv="bfloat16", activation_bytes=2)
SHORT = Workload(prompt_len=100, gen_len=20, max_prompt_len=128)


def machine(*, ram: int, device: int = 0, disk: int = 10**12, link: float = 1e9, num_devices: int = 1) -> Machine:
    """Return a machine of round figures, without a device if that has no bytes."""
    cpu = Processor(name="cpu", peak_flops_per_s=(("float32", 1e11),), pass_s=1e-4, token_s=1e-5)
    gpu = Processor(name="gpu", peak_flops_per_s=(("float32", 1e13),))
    levels = [
        MemoryLevel(name="disk", capacity_bytes=disk, read_bytes_per_s=5e8),
        MemoryLevel(name="ram", capacity_bytes=ram, read_bytes_per_s=1e10, processor=cpu),
        MemoryLevel(name="device", capacity_bytes=device, read_bytes_per_s=1e11, processor=gpu),
    ]
    ways = {("disk", "ram"): 5e8, ("ram", "device"): link, ("device", "ram"): link}
    links = [
        Link(source=source, target=target, rates=(LinkRate(transfer_bytes=1, bytes_per_s=rate),))
        for (source, target), rate in ways.items()
        if device or "device" not in (source, target)
    ]
    return Machine(
        name="round",
        levels=tuple(levels if device else levels[:2]),
        links=tuple(links),
        num_devices=num_devices if device else 0,
    )


def small_model(where: Machine, **others: object) -> CostModel:
    """Return the costs of the small model there, for short requests."""
    fields = {"workload": SHORT, "process_bytes": 0, **others}
    return CostModel(where, ModelCosts(SMALL, HALF), **fields)  # type: ignore[arg-type]


def routing(decode: tuple[float, ...] = (), prefill: tuple[float, ...] = (), distinct: float = 1.0) -> RoutingProfile:
    """Return routers that read these shares of what even ones would use, whatever the size of a pass."""
    return RoutingProfile(
        decode=(PassReads(1, distinct, decode),) if decode else (),
        prefill=(PassReads(1, distinct, prefill),) if prefill else (),
    )
