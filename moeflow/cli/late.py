"""Names that take seconds to import, fetched when a verb first uses them: so every --help answers at once.

Write `late.LLM`, not `from moeflow.cli.late import LLM`. A new heavy name needs one row and one import below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for the type checker only
    import torch as torch

    from moeflow.bench.engine_run import BATCH_SIZES as BATCH_SIZES
    from moeflow.bench.engine_run import PREFILL_LENS as PREFILL_LENS
    from moeflow.bench.engine_run import EngineRun as EngineRun
    from moeflow.bench.engine_run import make_cases as make_cases
    from moeflow.bench.http_target import HttpTarget as HttpTarget
    from moeflow.bench.http_target import check_address as check_address
    from moeflow.bench.plots import plot_cache_replay as plot_cache_replay
    from moeflow.bench.plots import plot_latencies as plot_latencies
    from moeflow.bench.plots import plot_time_lines as plot_time_lines
    from moeflow.bench.quality_run import answer as answer
    from moeflow.bench.quality_run import compare as compare
    from moeflow.bench.quality_run import describe_comparison as describe_comparison
    from moeflow.bench.quality_run import in_own_precision as in_own_precision
    from moeflow.bench.quality_run import make_task as make_task
    from moeflow.bench.serve_run import Progress as Progress
    from moeflow.bench.serve_run import Sweep as Sweep
    from moeflow.bench.serve_run import check_server as check_server
    from moeflow.bench.serve_run import run_engines as run_engines
    from moeflow.bench.serve_run import run_server as run_server
    from moeflow.bench.serve_run import with_policy as with_policy
    from moeflow.checkpoint.open import open_checkpoint as open_checkpoint
    from moeflow.checkpoint.upcycle import UpcycleRecipe as UpcycleRecipe
    from moeflow.engine.builtin import builtin_folder as builtin_folder
    from moeflow.engine.builtin import builtin_source as builtin_source
    from moeflow.engine.builtin import ensure_builtin_model as ensure_builtin_model
    from moeflow.engine.llm import LLM as LLM
    from moeflow.engine.machine import measure_machine as measure_machine
    from moeflow.engine.settings import Settings as Settings
    from moeflow.engine.settings import decide as decide
    from moeflow.engine.slab_files import pack as pack
    from moeflow.engine.upcycling import upcycle as upcycle
    from moeflow.engine.upcycling_quality import measure_quality as measure_quality
    from moeflow.kernels import cpu as cpu
    from moeflow.models.registry import read_bare_config as read_bare_config
    from moeflow.models.registry import read_model_config as read_model_config
    from moeflow.server.config import ServerConfig as ServerConfig
    from moeflow.server.jobs.journal import Journal as Journal
    from moeflow.server.jobs.local import answer_file as answer_file
    from moeflow.server.jobs.local import check_input as check_input
    from moeflow.server.launch import serve as serve

_WHOLE_MODULES = {"cpu": "moeflow.kernels.cpu", "torch": "torch"}
_MODULES = {
    "BATCH_SIZES": "moeflow.bench.engine_run",
    "EngineRun": "moeflow.bench.engine_run",
    "HttpTarget": "moeflow.bench.http_target",
    "Journal": "moeflow.server.jobs.journal",
    "LLM": "moeflow.engine.llm",
    "Progress": "moeflow.bench.serve_run",
    "ServerConfig": "moeflow.server.config",
    "PREFILL_LENS": "moeflow.bench.engine_run",
    "Settings": "moeflow.engine.settings",
    "Sweep": "moeflow.bench.serve_run",
    "UpcycleRecipe": "moeflow.checkpoint.upcycle",
    "answer": "moeflow.bench.quality_run",
    "answer_file": "moeflow.server.jobs.local",
    "builtin_folder": "moeflow.engine.builtin",
    "builtin_source": "moeflow.engine.builtin",
    "check_address": "moeflow.bench.http_target",
    "check_input": "moeflow.server.jobs.local",
    "check_server": "moeflow.bench.serve_run",
    "compare": "moeflow.bench.quality_run",
    "decide": "moeflow.engine.settings",
    "describe_comparison": "moeflow.bench.quality_run",
    "ensure_builtin_model": "moeflow.engine.builtin",
    "in_own_precision": "moeflow.bench.quality_run",
    "make_cases": "moeflow.bench.engine_run",
    "make_task": "moeflow.bench.quality_run",
    "measure_machine": "moeflow.engine.machine",
    "measure_quality": "moeflow.engine.upcycling_quality",
    "open_checkpoint": "moeflow.checkpoint.open",
    "pack": "moeflow.engine.slab_files",
    "plot_cache_replay": "moeflow.bench.plots",
    "plot_latencies": "moeflow.bench.plots",
    "plot_time_lines": "moeflow.bench.plots",
    "read_bare_config": "moeflow.models.registry",
    "read_model_config": "moeflow.models.registry",
    "run_engines": "moeflow.bench.serve_run",
    "run_server": "moeflow.bench.serve_run",
    "serve": "moeflow.server.launch",
    "upcycle": "moeflow.engine.upcycling",
    "with_policy": "moeflow.bench.serve_run",
}


def __getattr__(name: str) -> Any:
    if name in _WHOLE_MODULES:
        return importlib.import_module(_WHOLE_MODULES[name])
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(importlib.import_module(_MODULES[name]), name)
