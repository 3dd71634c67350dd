"""moeflow runs Mixture-of-Experts language models on the hardware people have.

    from moeflow import LLM, SamplingParams

    with LLM("path/to/model") as llm:
        for result in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
            print(result.outputs[0].text)

This is all that users import. Names are fetched when first used, so that importing moeflow costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moeflow.core.errors import (
        CapacityError,
        CheckpointError,
        ConfigError,
        EngineError,
        MoeflowError,
        RequestError,
    )
    from moeflow.core.pooling_params import PoolingParams
    from moeflow.core.sampling_params import SamplingParams
    from moeflow.engine.results import CompletionOutput, RequestOutput
    from moeflow.llm import LLM
    from moeflow.llm_settings import LLMSettings

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "LLMSettings",
    "SamplingParams",
    "PoolingParams",
    "RequestOutput",
    "CompletionOutput",
    "MoeflowError",
    "ConfigError",
    "CapacityError",
    "CheckpointError",
    "RequestError",
    "EngineError",
    "__version__",
]

_MODULES = {
    "LLM": "moeflow.llm",
    "LLMSettings": "moeflow.llm_settings",
    "SamplingParams": "moeflow.core.sampling_params",
    "PoolingParams": "moeflow.core.pooling_params",
    "RequestOutput": "moeflow.engine.results",
    "CompletionOutput": "moeflow.engine.results",
    "MoeflowError": "moeflow.core.errors",
    "ConfigError": "moeflow.core.errors",
    "CapacityError": "moeflow.core.errors",
    "CheckpointError": "moeflow.core.errors",
    "RequestError": "moeflow.core.errors",
    "EngineError": "moeflow.core.errors",
}


if not TYPE_CHECKING:  # for a type checker it would make every misspelt name one of any type

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'moeflow' has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
