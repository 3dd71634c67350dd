"""Settings of memory on the processor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from moeflow.settings.option import setting

_setting = partial(setting, group="Memory")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Memory of the engine and of its KV cache."""

    memory_bytes: int | None = _setting(
        "--memory",
        "bytes",
        "Memory for everything, such as 4GiB; experts that do not fit are read from disk.",
        is_common=True,
        depends_on=("device",),
    )
    kv_cache_bytes: int | None = _setting("--kv-cache", "bytes", "Memory for the KV cache, such as 2GiB.")
    kv_dtype: str = _setting(
        "--kv-dtype",
        "choice",
        "KV cache data type.",
        default="auto",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
