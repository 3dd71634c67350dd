"""Names of settings as users of `LLM` write them: those of fields of `Settings`, or of options of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from moeflow.core.errors import ConfigError
from moeflow.core.near_names import did_you_mean
from moeflow.settings.settings import options, user_settings

# What vLLM and llama.cpp call a setting -> ours.
_ALIKE: Final = (
    ("gpu_memory_utilization", "gpu_memory_bytes"),
    ("kv_cache_memory_bytes", "kv_cache_bytes"),
    ("kv_cache_dtype", "kv_dtype"),
    ("tensor_parallel_size", "num_ranks"),
    ("pipeline_parallel_size", "stages"),
    ("data_parallel_size", "num_replicas"),
    ("enable_prefix_caching", "prefix_caching"),
    ("quantization", "quantize"),
    ("served_model_name", "model_name"),
    ("speculative_config", "speculators"),
    ("n_ctx", "max_model_len"),
    ("n_threads", "num_threads"),
)


def named_as_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by the names of their fields: `memory` of `--memory` is `memory_bytes`.

    Raises: ConfigError for a name that is neither, and for a setting that is given twice.
    """
    fields = user_settings()
    by_flag = flag_names()
    named: dict[str, Any] = {}
    for name, value in settings.items():
        field = by_flag.get(name, name)
        if field not in fields:
            hint = did_you_mean(
                name, [*fields, *by_flag], "`LLMSettings` of moeflow.llm_settings has all of them", _ALIKE
            )
            raise ConfigError(f"there is no setting {name!r}; {hint}")
        if field in named:
            raise ConfigError(f"the setting {field!r} is given under two names; leave one out")
        named[field] = value
    return named


def flag_names() -> dict[str, str]:
    """Return names of options that differ from their fields' -> the fields."""
    flags = {option.flag.partition("/")[0].removeprefix("--").replace("-", "_"): it for it, option in options().items()}
    return {flag: field for flag, field in flags.items() if flag != field}
