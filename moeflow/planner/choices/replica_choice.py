"""Several engines on one machine: where there can be any, and what each of them may use."""

from __future__ import annotations

from moeflow.core.errors import ConfigError
from moeflow.core.units import format_bytes
from moeflow.settings.settings import Settings, given_options, written_files


def check_replicas(settings: Settings) -> None:
    """Raises: ConfigError where there cannot be several engines."""
    if (settings.num_replicas or 1) == 1:
        return
    if not settings.is_served:
        raise ConfigError("replicas (--replicas) are processes of `moeflow serve` and `moeflow batch`: use one here")
    for flag in given_options(settings, written_files()):
        raise ConfigError(f"{flag} writes the file of one engine: remove it, or use one replica (--replicas)")


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
