"""Finds this machine's GPUs in a process of its own: asking opens a CUDA context, which holds memory of the GPU.

The process tries each GPU with a small sum, since a torch build has kernels for some generations of GPUs only. One line
of JSON comes back.
"""

from __future__ import annotations

import sys

import msgspec

from moeflow.core.apart import run_apart
from moeflow.kernels.on_demand import torch

_BFLOAT16_SINCE = (8, 0)  # compute capability of NVIDIA GPUs whose tensor cores take bfloat16


class Gpu(msgspec.Struct, frozen=True):
    """A GPU that torch finds."""

    name: str  # as torch calls it
    free_bytes: int = 0
    has_bfloat16: bool = True  # in tensor cores
    problem: str = ""  # why torch cannot compute there; empty: it can


def find_gpus() -> list[Gpu]:
    """Return the GPUs; none if the process that looks for them fails. Blocks: for some seconds."""
    try:
        return [gpu for line in run_apart(__name__, b"") for gpu in msgspec.json.decode(line, type=list[Gpu])]
    except (OSError, msgspec.DecodeError):
        return []


def tried_gpus() -> list[Gpu]:
    """Return the GPUs that torch finds. Opens a context on each."""
    return [_tried(f"cuda:{number}") for number in range(torch.cuda.device_count())]


def _tried(name: str) -> Gpu:
    try:
        torch.ones(2, device=name).sum().item()
        free_bytes = torch.cuda.mem_get_info(name)[0]
        is_nvidia = torch.version.hip is None
        has_bfloat16 = not is_nvidia or torch.cuda.get_device_capability(name) >= _BFLOAT16_SINCE
    except RuntimeError as error:  # torch's, such as a lack of memory or of kernels for this GPU
        return Gpu(name, problem=str(error).partition("\n")[0])
    return Gpu(name, free_bytes, has_bfloat16)


def main() -> None:
    """Print what `tried_gpus` returns."""
    sys.stdout.buffer.write(msgspec.json.encode(tried_gpus()) + b"\n")


if __name__ == "__main__":
    main()
