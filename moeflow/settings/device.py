"""Settings of the processor and of a device that is smaller than the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Final

from moeflow.pipeline.catalog import OFFLOADING
from moeflow.settings.option import setting

MAX_THREADS: Final = 1024  # more than machines have cores
GROUP: Final = "Processor and device"

_setting = partial(setting, group=GROUP)


@dataclass(frozen=True, kw_only=True)
class DeviceSettings:
    """Threads, device and pipeline."""

    num_threads: int | None = _setting(
        "--threads", "count", "CPU threads.", shown_default="all cores", is_common=True, most=MAX_THREADS
    )
    device: str = _setting(
        "--device",
        "text",
        "Where to compute: cpu, cuda, cuda:1. cuda:MEMORY (experimental) uses that much of a GPU, and streams "
        "experts that do not fit. emulated:MEMORY,GB_PER_S emulates a GPU and its PCIe link. Append ,t4 to slow "
        "down computing in the same proportion, or ,torch to compute with torch like a GPU.",
        default="auto",
        is_common=True,
    )
    device_memory_bytes: int | None = _setting(
        "--device-memory",
        "bytes",
        "Maximum memory of a GPU to use, such as 16GiB.",
        shown_default="all that is free",
        depends_on=("device",),
    )
    pipeline: str | None = _setting(
        "--pipeline",
        "choice",
        "How weights are streamed to a device that is smaller than the model.",
        choices=tuple(OFFLOADING),
        shown_default="cgopipe",
        depends_on=("device",),
    )
    micro_batch: int | None = _setting(
        "--micro-batch",
        "count",
        "Tokens of a pipeline's micro-batch.",
        shown_default="32",
        depends_on=("device",),
    )
    resident_experts: float | None = field(  # share of experts that stays on such a device
        default=None, metadata={"depends_on": ("device",)}
    )
