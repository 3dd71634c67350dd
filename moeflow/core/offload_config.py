"""How a model larger than its device runs: which device, which pipeline, what stays where. Every number decided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from moeflow.core.errors import ConfigError
from moeflow.core.units import parse_bytes

PREFIX: Final = "emulated"
_HOW: Final = 'write it as "emulated:MEMORY,LINK", such as emulated:16GiB,12: its memory, and GB a second of its link'


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedSpeeds:
    """Bytes and FLOPs a second; 0: as fast as this machine does it."""

    link: float = 0.0  # bytes a second in each direction
    device_bytes: float = 0.0
    device_flops: float = 0.0
    host_bytes: float = 0.0
    host_flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDeviceConfig:
    """A device that this machine plays."""

    capacity_bytes: int
    speeds: EmulatedSpeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """A pass in micro-batches, with experts streamed to the device."""

    device: EmulatedDeviceConfig
    pipeline: str  # a name of pipeline/catalog.py, or "sequential"
    micro_batch_tokens: int  # of a micro-batch, unless one request has more in a pass
    num_resident_experts: int  # of each layer: they stay on the device (r_w of MoE-Lightning)
    num_resident_kv_layers: int  # whose keys and values stay on the device (r_c)
    window_blocks: int  # KV blocks of a micro-batch that the device holds at most; 0: the host attends


def t4_like(link_bytes_per_s: float) -> EmulatedSpeeds:
    """Return speeds that relate to a link's as those of a T4 and its host do.

    Source: T4 data sheet (300 GB/s, 65 TFLOP/s in 16 bits); 12 GB/s is what its PCIe 3.0 link moves; a host of 24
    Xeon cores as in MoE-Lightning's setting S1 (about 100 GB/s, 1.6 TFLOP/s).
    """
    link = 12e9
    scale = link_bytes_per_s / link
    return EmulatedSpeeds(
        link=link_bytes_per_s,
        device_bytes=300e9 * scale,
        device_flops=65e12 * scale,
        host_bytes=100e9 * scale,
        host_flops=1.6e12 * scale,
    )


def parse_emulated_device(text: str) -> EmulatedDeviceConfig:
    """Read "emulated:16GiB,12" or "emulated:1GiB,0.25,t4", which also slows down computing as a T4 and its host would.

    Raises: ConfigError.
    """
    name, _, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",")]
    if name != PREFIX or len(parts) not in (2, 3):
        raise ConfigError(f"device {text!r} is no emulated device: {_HOW}")
    try:
        capacity_bytes, link = parse_bytes(parts[0]), float(parts[1]) * 1e9
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"device {text!r} cannot be read ({error}): {_HOW}") from None
    if not (math.isfinite(link) and link > 0):
        raise ConfigError(f"device {text!r} has a link of {parts[1]} GB/s: {_HOW}")
    if parts[2:] not in ([], ["t4"]):
        raise ConfigError(f"device {text!r} is to compute like {parts[2]!r}: only t4 is known, or leave it away")
    speeds = t4_like(link) if parts[2:] else EmulatedSpeeds(link=link)
    return EmulatedDeviceConfig(capacity_bytes=capacity_bytes, speeds=speeds)
