"""Puts plain Python in the place of packages that moeflow imports but hardly needs to run a model from safetensors.

For a machine on which nothing can be installed, such as one with a GPU and no network: `install` replaces msgspec
(records become dataclasses), isal (zlib) and psutil (what Linux tells in /proc). Nothing of
it serves: server, packed files and records of routing need the packages themselves.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import inspect
import json
import os
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, dataclass_transform


def install() -> list[str]:
    """Replace those packages that are missing, and return their names."""
    missing = [name for name in _MAKERS if importlib.util.find_spec(name) is None]
    for name in missing:
        for module in _MAKERS[name]():
            sys.modules[module.__name__] = module
    return missing


@dataclass_transform()
class Struct:
    """`msgspec.Struct` as a dataclass."""

    def __init_subclass__(cls, frozen: bool = False, kw_only: bool = False, eq: bool = True, **_: Any) -> None:
        for name in inspect.get_annotations(cls):
            if isinstance(default := cls.__dict__.get(name), (list, dict)):
                setattr(cls, name, dataclasses.field(default_factory=default.copy))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only, eq=eq)(cls)


def _encode(value: Any, *, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    def plain(it: Any) -> Any:
        return dataclasses.asdict(it) if dataclasses.is_dataclass(it) and not isinstance(it, type) else enc_hook(it)

    return json.dumps(value, default=plain if enc_hook else dataclasses.asdict, separators=(",", ":")).encode()


def _decode(text: bytes | str, *, type: Any = None) -> Any:
    if type is not None:
        raise ImportError("typed JSON needs the package msgspec, which is not installed")
    return json.loads(text)


def _msgspec() -> list[types.ModuleType]:
    structs = _module("msgspec.structs", asdict=lambda value: dict(vars(value)), replace=dataclasses.replace)
    encoder = _module("msgspec.json", encode=_encode, decode=_decode)
    parts = {
        "Struct": Struct,
        "field": dataclasses.field,
        "Meta": lambda **_: None,
        "MsgspecError": ValueError,
        "structs": structs,
        "json": encoder,
    }
    return [_module("msgspec", **parts), structs, encoder]


def _isal() -> list[types.ModuleType]:
    part = _module("isal.isal_zlib", crc32=zlib.crc32)
    return [_module("isal", isal_zlib=part), part]


def _psutil() -> list[types.ModuleType]:
    def virtual_memory() -> types.SimpleNamespace:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = {line[0].rstrip(":"): 1024 * int(line[1]) for line in lines}
        return types.SimpleNamespace(total=sizes["MemTotal"], available=sizes["MemAvailable"])

    def process(number: int | None = None) -> types.SimpleNamespace:
        pages = int(Path(f"/proc/{number or os.getpid()}/statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE")
        return types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=rss))

    def cpu_count(logical: bool = True) -> int | None:
        return os.cpu_count() if logical else None

    return [
        _module("psutil", virtual_memory=virtual_memory, Process=process, cpu_count=cpu_count, Error=OSError),
    ]


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name, "A stand-in: see studies/stand_ins.py.")
    vars(module).update(members)
    module.__path__ = []  # a package
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)  # transformers looks for it
    return module


_MAKERS: dict[str, Callable[[], list[types.ModuleType]]] = {
    "msgspec": _msgspec,
    "isal": _isal,
    "psutil": _psutil,
}
