"""Modules that are imported on first use, because their import is slow and few starts need them.

`torch` is the most important one. With packed weights, the CPU kernels use NumPy's arrays, and importing torch would
take most of the time to a first token. A module that may be needed for that token imports torch from here, and
uses nothing of it at import. For others write

    with on_demand(__name__):
        from moeflow.engine import lossy_routing
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Final, ParamSpec, TypeVar

from moeflow.kernels.whole_import import import_whole

P = ParamSpec("P")
T = TypeVar("T")
_LOCK: Final = threading.RLock()  # of `__import__`, while a block replaces it


class _OnDemand(ModuleType):
    """A proxy of a module. It caches no attribute, so changes in the module are visible."""

    _module: ModuleType | None = None  # kept, as to ask for it is dear where a pass asks often

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = import_whole(self.__name__)
        return getattr(self._module, name)


@contextmanager
def on_demand(importer: str) -> Iterator[None]:
    """Bind a proxy for each module that the block imports; the first use of a proxy imports its module.

    `importer` is the `__name__` of the module with the block. Write `from package import module`: names of anything
    else and `import package.module` do not work.
    """

    def import_later(
        name: str, globals: Mapping[str, Any] | None = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if globals is None or globals.get("__name__") != importer:  # another thread's, or a finalizer's
            return import_now(name, globals, locals, fromlist, level)
        return SimpleNamespace(**{it: _OnDemand(f"{name}.{it}") for it in fromlist}) if fromlist else _OnDemand(name)

    with _LOCK:
        import_now = builtins.__import__
        builtins.__import__ = import_later
        try:
            yield
        finally:
            builtins.__import__ = import_now


with on_demand(__name__):
    import torch as torch


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
