"""Sets up a process as configured: threads, instruction set, how much of a GPU's memory it may take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CapacityError
from moeflow.core.model_config import ModelConfig
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import torch
from moeflow.planner.costs.process_memory import PROCESS_BYTES

if TYPE_CHECKING:
    from moeflow.kernels.arrays import Device

COPY_THREADS: Final = 4  # that move weights between two places of main memory: about as many as keep it busy


def set_up(config: EngineConfig) -> None:
    """Set up this process as configured: threads, instruction set, limit of a GPU's memory."""
    _set_up_threads(config)
    _limit_device(config)


def _set_up_threads(config: EngineConfig) -> None:
    """Give the cores to the kernels, or to torch: threads of both at once would take them from each other.

    Beside a device that computes in torch, the kernels attend while torch copies weights, for which a few threads do.
    """
    cpu_isa = config.cpu_isa if config.hybrid is None else config.hybrid.cpu_isa
    if cpu_isa:
        extension.use_isa(cpu_isa)
    if cpu_isa or (config.offload is not None and extension.is_available()):
        _start_threads(config.num_threads)
    num_threads = config.num_threads
    if config.offload is not None and config.offload.cuda is not None:
        num_threads = min(num_threads, COPY_THREADS)
    if needs_torch(config):
        torch.set_num_threads(1 if cpu_isa else num_threads)


def _start_threads(count: int) -> None:
    try:
        extension.set_num_threads(count)
    except RuntimeError as error:
        raise CapacityError(
            f"{count} threads cannot be started ({error}): the system or its container allows fewer. Take fewer "
            "(--threads), or raise the limit of processes (ulimit -u)"
        ) from None


def _limit_device(config: EngineConfig) -> None:
    """Limit the memory that torch allocates on the device; PROCESS_BYTES of it are for what CUDA itself takes."""
    if config.gpu_memory_bytes:
        device = device_of_layers(config)
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        share = max(config.gpu_memory_bytes - PROCESS_BYTES, 0) / total_bytes
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)  # plans for larger GPUs allow more


def needs_torch(config: EngineConfig) -> bool:
    """Return whether tensors are torch's; else they are NumPy's, as all that computes is the CPU kernels.

    Code that shares a model with other processes or devices, or drafts for it, computes in torch, too.
    """
    shares = config.offload or config.parallel or config.experts
    return not (config.cpu_isa and config.packed_file) or bool(shares or config.draft_models or config.lossy_top_k)


def device_of_arrays(config: EngineConfig, shape: ModelConfig) -> Device:
    """Return where a model's activations, keys and values are; None: in NumPy's arrays."""
    if needs_torch(config) or shape.encoder is not None or shape.attention.head_dim % 2:
        return torch.device(config.device)
    return None


def device_of_layers(config: EngineConfig) -> torch.device:
    """Return where the layers' weights are, and so where torch computes, if it does."""
    return torch.device(config.device if config.offload is None else config.offload.torch_device)
