"""Several engines on one machine: where there can be any, and what each of them may use."""

from __future__ import annotations

from moeflow.core.errors import ConfigError
from moeflow.core.model_config import ModelConfig
from moeflow.core.parallel_config import ExpertParallelConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.parallel.blocks import even_blocks
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.rank_choice import count_ranks
from moeflow.settings.settings import Settings, given_options, written_files


def check_replicas(settings: Settings) -> None:
    """Raises: ConfigError where there cannot be several engines."""
    if (settings.num_replicas or 1) == 1:
        return
    if not settings.is_served:
        raise ConfigError("replicas (--replicas) are processes of `moeflow serve` and `moeflow batch`: use one here")
    for flag in given_options(settings, written_files()):
        raise ConfigError(f"{flag} writes the file of one engine: remove it, or use one replica (--replicas)")


def choose_expert_parallel(
    settings: Settings, shape: ModelConfig, *, cpu_isa: str, comes_from_disk: bool, reasons: Reasons
) -> ExpertParallelConfig | None:
    """Return how replicas share experts; None: each computes apart. Raises: ConfigError if they cannot.

    `comes_from_disk`: not all experts fit into memory.
    """
    number = settings.num_replicas or 1
    if not settings.expert_parallel:
        return None
    if number == 1:
        raise ConfigError("replicas share experts (--expert-parallel): set the number of replicas (--replicas)")
    if settings.ray_address is not None or settings.listen_ranks is not None:
        raise ConfigError(
            "replicas that share experts (--expert-parallel) are processes of this machine: remove --ray-address and "
            "--listen-ranks"
        )
    if count_ranks(settings) > 1:
        raise ConfigError(
            "replicas that share experts (--expert-parallel) have one process each: remove --ranks and --stages, "
            "or let ranks alone share the model"
        )
    if number > shape.routing.num_experts:
        have = f"only {shape.routing.num_experts} experts a layer" if shape.routing.num_experts else "no experts"
        raise ConfigError(
            f"{number} replicas cannot share the experts (--expert-parallel) of a model with {have}: use fewer "
            "(--replicas), or have each compute apart"
        )
    if not cpu_isa:
        raise ConfigError(
            "replicas that share experts (--expert-parallel) compute with the CPU's kernels, which are not there: "
            f"{extension.why_not()}"
        )
    if comes_from_disk:
        raise ConfigError(
            "replicas that share experts (--expert-parallel) keep them in memory, once for all, but --memory is "
            "too little: allow more, or have each compute apart"
        )
    shared = ExpertParallelConfig(num_replicas=number)
    reasons.append(("experts", _what_each_computes(shared, shape.routing.num_experts)))
    return shared


def share_of(total_bytes: int, num_replicas: int, *, shared_bytes: int) -> int:
    """Return what each replica may use of so much memory, `shared_bytes` included, which all have in common."""
    shared_bytes = min(shared_bytes, total_bytes)
    return shared_bytes + (total_bytes - shared_bytes) // num_replicas


def what_each_has(num_replicas: int, num_threads: int, num_bytes: int, *, maps_together: bool) -> str:
    """Return the decision. `maps_together`: the replicas have their weights in the same pages of memory."""
    weights = "the weights are mapped, and in memory once" if maps_together else "weights are in memory for each"
    threads = "1 thread" if num_threads == 1 else f"{num_threads} threads"
    memory = f"{format_bytes(num_bytes)} of memory, what is shared included"
    return f"{num_replicas}: each has {threads} and may use {memory}; {weights}"


def _what_each_computes(parallel: ExpertParallelConfig, num_experts: int) -> str:
    """Return how replicas share the experts."""
    sizes = sorted({len(block) for block in even_blocks(num_experts, parallel.num_replicas)})
    return (
        f"each replica computes {' or '.join(map(str, sizes))} of the {num_experts} experts of a layer for all; there "
        "is one copy of the experts in all"
    )
