"""A torch device in main memory that refuses what CUDA refuses, and counts launches, synchronizations and copies.

Registered as torch's PrivateUse1 device. That changes torch for the whole process, so use it in one of its own.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import moeflow

_PACKAGE: Final = f"{Path(moeflow.__file__).parent}/"
NAME: Final = "softgpu"
# Neither start a kernel nor move a number.
_VIEWS: Final = frozenset(
    (
        *("view", "_unsafe_view", "as_strided", "slice", "select", "transpose", "t", "permute", "expand", "unsqueeze"),
        *("squeeze", "split", "split_with_sizes", "unbind", "detach", "alias", "_reshape_alias", "chunk", "narrow"),
        *("lift_fresh", "empty", "empty_strided", "new_empty", "empty_like", "unfold", "diagonal"),
    )
)
# Their results, or the shapes of their results, are needed on the host.
_SYNCHRONIZING: Final = frozenset(
    (
        *("nonzero", "bincount", "unique", "masked_select", "_local_scalar_dense", "item", "equal", "is_nonzero"),
        "repeat_interleave",
    )
)
_SCALARS: Final = ("_local_scalar_dense", "equal", "is_nonzero")
_TAKES_HOST_INDICES: Final = ("index", "index_put_", "_index_put_impl_", "index_put")

_setup_privateuseone_for_python_backend(NAME)
DEVICE: Final = torch.device(NAME, 0)


class Counts:
    """What happened on the device, each by the line of moeflow that caused it."""

    def __init__(self) -> None:
        self.launches: collections.Counter[str] = collections.Counter()
        self.synchronizations: collections.Counter[str] = collections.Counter()
        self.pageable_copies: collections.Counter[str] = collections.Counter()
        self.late_copies: list[Callable[[], Any]] = []  # to the host, for which it has not waited yet

    def clear(self) -> None:
        """Begin again."""
        for counter in (self.launches, self.synchronizations, self.pageable_copies):
            counter.clear()

    def arrive(self) -> None:
        """Have all copies to the host arrive."""
        while self.late_copies:
            self.late_copies.pop(0)()

    def report(self) -> dict[str, dict[str, int]]:
        """Return all counts."""
        return {
            "launches": dict(self.launches),
            "synchronizations": dict(self.synchronizations),
            "pageable_copies": dict(self.pageable_copies),
        }


COUNTS: Final = Counts()


class SoftGraph:
    """Work that is recorded once, and can be done again with the numbers that memory has then.

    As on CUDA, recorded work neither waits for the device nor copies to the host.
    """

    current: SoftGraph | None = None

    def __init__(self) -> None:
        self._work: list[Callable[[], None]] = []

    def capture_begin(self) -> None:
        """Record from now on."""
        assert SoftGraph.current is None
        SoftGraph.current = self

    def capture_end(self) -> None:
        """Record no more."""
        assert SoftGraph.current is self
        SoftGraph.current = None

    def replay(self) -> None:
        """Do the work again."""
        for work in self._work:
            work()

    def add(self, work: Callable[[], None]) -> None:
        """Record work."""
        self._work.append(work)


def record(out: Any, compute: Callable[[], Any]) -> None:
    """Note, while a graph is recorded, how the numbers of `out` are computed again; None: in place."""
    graph = SoftGraph.current
    if graph is None:
        return

    def again() -> None:
        found = compute()
        if out is None:
            return
        for target, source in zip(_tensors([out]), _tensors([found]), strict=True):
            target.copy_(source)

    graph.add(again)


def _count(counter: collections.Counter[str], name: str, number: int = 1) -> None:
    """Count now, and at each replay of a graph that is being recorded."""

    def count() -> None:
        counter[name] += number

    count()
    if SoftGraph.current is not None:
        assert counter is COUNTS.launches, f"a graph cannot have {name}"
        SoftGraph.current.add(count)


class SoftTensor(torch.Tensor):
    """A tensor on the device; `raw` has its numbers."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> SoftTensor:
        made: SoftTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:
        return f"SoftTensor({self.raw})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    """Takes operations that make tensors on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def soft_gpu() -> Iterator[Counts]:
    """Have the device in the block."""
    tolist = torch.Tensor.tolist

    def counted_tolist(self: torch.Tensor) -> Any:
        if isinstance(self, SoftTensor):
            _count(COUNTS.synchronizations, f"tolist @ {_line()}")
            return tolist(self.raw)
        return tolist(self)

    torch._C._set_only_lift_cpu_tensors(True)
    torch.Tensor.tolist = counted_tolist  # type: ignore[method-assign]
    try:
        with _Mode():
            yield COUNTS
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]
        torch._C._set_only_lift_cpu_tensors(False)


def raw(x: Any) -> Any:
    """Return the numbers of a tensor on the device; anything else as it is."""
    return x.raw if isinstance(x, SoftTensor) else x


def wrapped(x: Any) -> Any:
    """Return a tensor on the device with these numbers; anything else as it is."""
    return SoftTensor(x) if isinstance(x, torch.Tensor) and not isinstance(x, SoftTensor) else x


def count_launch(name: str, number: int = 1) -> None:
    """Count kernels that are started outside torch."""
    _count(COUNTS.launches, name, number)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among values, and within lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return what a function makes of a value, or of each value of a list."""
    if isinstance(value, list | tuple):
        return type(value)(_mapped(function, it) for it in value)
    return function(value)


def _line() -> str:
    """Return the line of moeflow that is being run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and "on_demand" not in file:
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _is_soft(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    is_on_device = any(isinstance(it, SoftTensor) for it in tensors)
    if not is_on_device and not _is_soft(kwargs.get("device")):
        return func(*args, **kwargs)
    name = func.overloadpacket.__name__
    if name == "_to_copy":
        return _convert(func, args, kwargs, is_on_device)
    if name in ("copy_", "_copy_from"):
        return _copy(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
    if is_on_device:
        _check_devices(name, tensors)
    if name in _SYNCHRONIZING:
        _count(COUNTS.synchronizations, f"{name} @ {_line()}")
    if name not in _VIEWS:
        _count(COUNTS.launches, f"{name} @ {_line()}")
    compute = partial(func, *_mapped(raw, args), **_for_host(kwargs))
    out = compute()
    if name not in _VIEWS:
        record(None if name.endswith("_") or "out" in kwargs else out, compute)
    if name in _SCALARS:
        return out
    if "out" in kwargs:
        return kwargs["out"]
    if name.endswith("_") and not name.endswith("__"):
        return args[0]
    return _mapped(wrapped, out)


def _for_host(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that make the same in main memory."""
    found = {key: _mapped(raw, value) for key, value in kwargs.items() if key != "pin_memory"}
    return found | {"device": "cpu"} if "device" in found else found


def _convert(func: Any, args: Any, kwargs: dict[str, Any], is_on_device: bool) -> Any:
    target = kwargs.get("device")
    goes_to_device = is_on_device if target is None else _is_soft(target)
    is_pinned = bool(kwargs.get("non_blocking"))
    given = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    compute = partial(func, *_mapped(raw, args), **given)
    out = compute()
    if is_on_device and not goes_to_device:
        _count(COUNTS.synchronizations, f"copy to the host @ {_line()}")
    if is_on_device and goes_to_device:
        _count(COUNTS.launches, f"_to_copy @ {_line()}")
    if goes_to_device and not is_on_device:
        if not is_pinned:
            _count(COUNTS.pageable_copies, _line())
        out = out.clone()
    if goes_to_device:
        record(out, compute)
    return wrapped(out) if goes_to_device else out


def _copy(target: Any, source: Any, is_pinned: bool) -> Any:
    to_device, from_device = isinstance(target, SoftTensor), isinstance(source, SoftTensor)
    if to_device and from_device:
        _count(COUNTS.launches, f"copy_ @ {_line()}")
    elif to_device:
        if not is_pinned:
            _count(COUNTS.pageable_copies, _line())
    elif from_device:
        if is_pinned:
            _copy_late(target, raw(source))
            return target
        _count(COUNTS.synchronizations, f"copy to the host @ {_line()}")
    copy = partial(raw(target).copy_, raw(source))
    copy()
    if to_device:
        record(None, copy)
    return target


def _copy_late(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy to the host, where the numbers arrive when it waits; while a graph is recorded, at its replays only."""

    def copy() -> None:
        COUNTS.late_copies.append(partial(target.copy_, source.clone()))

    if SoftGraph.current is None:
        copy()
    else:
        SoftGraph.current.add(copy)


def _check_devices(name: str, tensors: list[torch.Tensor]) -> None:
    """Refuse tensors of both kinds of memory, as CUDA does, apart from numbers and indices."""
    on_host = [it for it in tensors if not isinstance(it, SoftTensor) and it.dim() > 0]
    if not on_host:
        return
    if name in _TAKES_HOST_INDICES and all(it.dtype in (torch.int64, torch.bool) for it in on_host):
        _count(COUNTS.pageable_copies, f"index @ {_line()}")
        return
    raise RuntimeError(f"Expected all tensors to be on the same device: {name} at {_line()}")
