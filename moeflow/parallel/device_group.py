"""Ranks that each have a device: torch.distributed adds up tensors of devices, and all else goes through the host.

Sums are split among ranks, so a result may differ from that of one device by rounding. All ranks get the same bits.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from moeflow.core.errors import ConfigError, GroupError
from moeflow.parallel.columns import Columns
from moeflow.parallel.group import Channel, Group

_HERE: Final = "127.0.0.1"  # ranks with devices are processes of one machine
_TIMEOUT: Final = timedelta(minutes=10)  # of a sum: the other ranks may compile kernels meanwhile


class DeviceGroup(Group):
    """One rank's view of its group, with sums on devices; `host` has the same ranks."""

    def __init__(self, host: Group, device: torch.device) -> None:
        """Meet the other ranks. Blocks: until all have. Raises: ConfigError without NCCL on a GPU; GroupError."""
        self._host, self._device = host, device
        if device.type == "cuda" and not dist.is_nccl_available():
            raise ConfigError(
                f"{host.size} ranks (--ranks) on GPUs add up their sums with NCCL, which this torch does not have: "
                "install torch with CUDA for Linux, or use one rank"
            )
        with _meeting_place(host) as place, _as_group_errors():
            store = dist.FileStore(str(place), host.size)
            if device.type == "cuda":
                self._backend: Any = _nccl(store, host, device)
            else:
                self._backend = _gloo(store, host)
            self.all_reduce("first meeting", torch.zeros(1, device=device))
            host.barrier("devices have met")

    @property
    def rank(self) -> int:
        """See `Group`."""
        return self._host.rank

    @property
    def size(self) -> int:
        """See `Group`."""
        return self._host.size

    def all_reduce(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, which takes the tensor's place where that is on a GPU.

        `name` is for errors. Shapes: the same on all ranks. Blocks: on a GPU not at all, which waits by itself.
        Raises: GroupError.
        """
        try:
            if self._device.type == "cuda":
                self._backend.allreduce([tensor]).wait()
                return tensor
            summed = tensor.cpu()  # gloo adds in main memory
            self._backend.allreduce([summed]).wait()
            return summed.to(self._device)
        except RuntimeError as error:
            raise GroupError(f"all_reduce {name!r} failed: {error}") from None

    def all_gather(self, name: str, tensor: Tensor) -> list[Tensor]:
        """See `Group`."""
        return self._host.all_gather(name, tensor)

    def all_to_all(self, name: str, parts: Sequence[Tensor]) -> list[Tensor]:
        """See `Group`."""
        return self._host.all_to_all(name, parts)

    def barrier(self, name: str) -> None:
        """See `Group`."""
        self._host.barrier(name)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """See `Group`."""
        return self._host.subgroup(ranks)

    def channel(self, rank: int) -> Channel:
        """See `Group`."""
        return self._host.channel(rank)

    def abort(self, reason: str) -> None:
        """See `Group`."""
        self._host.abort(reason)

    def close(self) -> None:
        """See `Group`."""
        self._host.close()


class SummedColumns(Columns):
    """Columns on devices: ranks add up matrices with zeros in the columns of others."""

    def __init__(self, group: DeviceGroup, name: str, blocks: Sequence[range]) -> None:
        """See `Columns`."""
        super().__init__(group, name, blocks)
        self._devices = group

    def gather(self, own: Tensor) -> Tensor:
        """See `Columns.gather`."""
        whole = own.new_zeros(own.shape[0], self.count)
        whole[:, self.own.start : self.own.stop] = own
        return self._devices.all_reduce(self._name, whole)


@contextlib.contextmanager
def _meeting_place(host: Group) -> Iterator[Path]:
    """Yield the path of a file that the first rank chooses and removes."""
    with contextlib.ExitStack() as undo:
        own = b""
        if host.rank == 0:
            own = str(Path(undo.enter_context(tempfile.TemporaryDirectory()), "ranks")).encode()
        first, *_ = host.all_gather("where devices meet", torch.tensor(list(own), dtype=torch.uint8))
        yield Path(bytes(first.tolist()).decode())


@contextlib.contextmanager
def _as_group_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupError(f"the devices of the ranks do not meet: {error}") from None


def _nccl(store: dist.Store, host: Group, device: torch.device) -> Any:
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _TIMEOUT
    return dist.ProcessGroupNCCL(store, host.rank, host.size, options)


def _gloo(store: dist.Store, host: Group) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=_HERE)]
    return dist.ProcessGroupGloo(store, host.rank, host.size, options)
