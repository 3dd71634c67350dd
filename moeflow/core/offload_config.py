"""How a model larger than its device runs: which device, which pipeline, what stays where. Every number decided."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.core.units import parse_bytes

PREFIX: Final = "emulated"
CUDA: Final = "cuda"
_HOW: Final = 'write it as "emulated:MEMORY,LINK", such as emulated:16GiB,12: its memory, and GB a second of its link'
_HOW_CUDA: Final = 'write it as "cuda:MEMORY" or "cuda:NUMBER:MEMORY", such as cuda:16GiB or cuda:1:16GiB'
_LIKE_T4: Final = "t4"
_IN_TORCH: Final = "torch"


class EmulatedSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes and FLOPs a second; 0: as fast as this machine does it."""

    link: float = 0.0  # bytes a second in each direction
    device_bytes: float = 0.0
    device_flops: float = 0.0
    host_bytes: float = 0.0
    host_flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDeviceConfig:
    """A device that this machine emulates."""

    capacity_bytes: int
    speeds: EmulatedSpeeds
    computes_in_torch: bool = False  # with a GPU's operations, not the CPU's kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDeviceConfig:
    """A part of a GPU's memory."""

    name: str  # as torch calls it
    memory_bytes: int  # that may be used
    capacity_bytes: int  # of these, for weights, keys and values, and activations


DeviceConfig = EmulatedDeviceConfig | CudaDeviceConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """A pass in micro-batches, with experts streamed to the device."""

    emulated: EmulatedDeviceConfig | None = None  # one of these two
    cuda: CudaDeviceConfig | None = None
    pipeline: str  # a name of pipeline/catalog.py, or "sequential"
    micro_batch_tokens: int  # of a micro-batch, unless one request has more in a pass
    prompt_micro_batch_tokens: int  # likewise, of a micro-batch of prompts
    num_resident_experts: int  # of each layer: they stay on the device (r_w of MoE-Lightning)
    num_resident_kv_layers: int  # whose keys and values stay on the device (r_c)
    window_blocks: int  # KV blocks of a micro-batch that the device holds at most; 0: all layers' stay there
    num_hosted_experts: int | None = None  # of each layer: the host computes them; None: the fastest by measurement

    @property
    def device(self) -> DeviceConfig:
        """The one that is configured."""
        device = self.emulated or self.cuda
        assert device is not None
        return device

    @property
    def torch_device(self) -> str:
        """Where the device's tensors are, as torch calls it."""
        return "cpu" if self.cuda is None else self.cuda.name

    def beside(self, num_devices: int) -> OffloadConfig:
        """Return the same for one of so many devices, each with a link of its own, which divide an emulated host."""
        if self.emulated is None:
            return self
        speeds = self.emulated.speeds
        shared = msgspec.structs.replace(
            speeds, host_bytes=speeds.host_bytes / num_devices, host_flops=speeds.host_flops / num_devices
        )
        return replace(self, emulated=replace(self.emulated, speeds=shared))

    @property
    def computes_in_torch(self) -> bool:
        """Whether the device computes with torch tensors, not with packed weights by the CPU's kernels."""
        return self.emulated is None or self.emulated.computes_in_torch


def t4_like(link_bytes_per_s: float) -> EmulatedSpeeds:
    """Return speeds that relate to a link's as those of a T4 and its host do.

    Source: T4 data sheet (320 GB/s, 65 TFLOP/s in 16 bits), as in `planner/machines/t4.json`; 12 GB/s is what its
    PCIe 3.0 link moves; a host of 24 Xeon cores as in MoE-Lightning's setting S1 (about 100 GB/s, 1.6 TFLOP/s).
    """
    link = 12e9
    scale = link_bytes_per_s / link
    return EmulatedSpeeds(
        link=link_bytes_per_s,
        device_bytes=320e9 * scale,
        device_flops=65e12 * scale,
        host_bytes=100e9 * scale,
        host_flops=1.6e12 * scale,
    )


def parse_emulated_device(text: str) -> EmulatedDeviceConfig:
    """Read "emulated:16GiB,12", with ",t4" to slow down computing too, ",torch" to compute in torch, or both.

    Raises: ConfigError.
    """
    name, _, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",")]
    if name != PREFIX:
        raise ConfigError(f"device {text!r} is no emulated device: {_HOW}")
    memory, link = parts[0], parts[1] if len(parts) > 1 else ""
    for part, missing in ((memory, "how much memory it has"), (link, "how fast its link is")):
        if not part:
            raise ConfigError(f"device {text!r} does not say {missing}: {_HOW}")
    try:
        capacity_bytes = parse_bytes(memory)
    except ConfigError as error:
        raise ConfigError(f"device {text!r}: {error}. For a device, {_HOW}") from None
    link_bytes_per_s = _read_link(text, link)
    for part in parts[2:]:
        if part not in (_LIKE_T4, _IN_TORCH):
            raise ConfigError(f"device {text!r} is to compute like {part!r}: only t4 and torch are known, or remove it")
    speeds = t4_like(link_bytes_per_s) if _LIKE_T4 in parts[2:] else EmulatedSpeeds(link=link_bytes_per_s)
    return EmulatedDeviceConfig(capacity_bytes=capacity_bytes, speeds=speeds, computes_in_torch=_IN_TORCH in parts[2:])


def _read_link(text: str, link: str) -> float:
    """Return bytes a second. Raises: ConfigError if it is no number above 0."""
    try:
        gigabytes = float(link)
    except ValueError:
        raise ConfigError(f"device {text!r}: its link is {link!r}, which is no number: {_HOW}") from None
    if not (math.isfinite(gigabytes) and gigabytes > 0):
        raise ConfigError(
            f"device {text!r}: over a link of {link} GB/s nothing ever arrives: give it a number above 0, such as 12"
        )
    return gigabytes * 1e9


def parse_cuda_device(text: str) -> tuple[str, int | None]:
    """Read "cuda", "cuda:1", "cuda:16GiB" or "cuda:1:16GiB": the device as torch calls it, and bytes of its memory.

    Raises: ConfigError.
    """
    name, *parts = text.split(":")
    number = parts.pop(0) if parts and parts[0].isdecimal() else "0"
    if name != CUDA or len(parts) > 1:
        raise ConfigError(f"device {text!r} cannot be read: {_HOW_CUDA}")
    try:
        memory_bytes = parse_bytes(parts[0]) if parts else None
    except ConfigError as error:
        raise ConfigError(f"device {text!r} cannot be read ({error}): {_HOW_CUDA}") from None
    return f"{CUDA}:{number}", memory_bytes
