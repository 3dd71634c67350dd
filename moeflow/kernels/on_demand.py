"""Modules that are imported when something of them is first used: what takes long to import, and few starts need.

`torch` is the most important one. With packed weights, the CPU kernels use NumPy's arrays, and importing torch would
take most of the time to a first token. A module that may be needed for that token takes it from here, and
names nothing of it at import. For others write

    if TYPE_CHECKING:
        from moeflow.engine import lossy_routing
    else:
        lossy_routing = on_demand("moeflow.engine.lossy_routing")
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from moeflow.kernels.whole_import import import_whole

if TYPE_CHECKING:
    import torch as torch

P = ParamSpec("P")
T = TypeVar("T")


class _OnDemand(ModuleType):
    """A proxy of a module. It caches no attribute, so changes in the module are visible."""

    _module: ModuleType | None = None  # kept, as to ask for it is dear where a pass asks often

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = import_whole(self.__name__)
        return getattr(self._module, name)


def on_demand(name: str) -> Any:
    """Return a proxy that imports the module on first use."""
    return _OnDemand(name)


if not TYPE_CHECKING:
    torch = on_demand("torch")


def import_torch() -> None:
    """Import torch now, since it will be needed and its memory is to be measured."""
    import_whole("torch")


def without_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function in torch's inference mode, if torch is there."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if sys.modules.get("torch") is None or torch.is_inference_mode_enabled():  # entered by a caller
            return function(*args, **kwargs)
        with torch.inference_mode():
            return function(*args, **kwargs)

    return run
