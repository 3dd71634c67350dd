"""Names that take seconds to import, fetched when a verb first uses them: so every --help answers at once.

Write `late.LLM`, not `from moeflow.cli.lazy import LLM`. A new heavy name needs one row and one import below.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moeflow.engine.interrupts import hold_interrupts

if TYPE_CHECKING:  # for the type checker only
    import torch as torch

    from moeflow.bench.batch_run import BatchJob as BatchJob
    from moeflow.bench.batch_run import BatchProgress as BatchProgress
    from moeflow.bench.batch_run import question_lengths as question_lengths
    from moeflow.bench.batch_run import run_batch_job as run_batch_job
    from moeflow.bench.batch_run import run_beside as run_beside
    from moeflow.bench.engine_run import BATCH_SIZES as BATCH_SIZES
    from moeflow.bench.engine_run import PREFILL_LENS as PREFILL_LENS
    from moeflow.bench.engine_run import EngineRun as EngineRun
    from moeflow.bench.engine_run import make_cases as make_cases
    from moeflow.bench.http_target import HttpTarget as HttpTarget
    from moeflow.bench.http_target import check_address as check_address
    from moeflow.bench.plan_plots import plot_policy_map as plot_policy_map
    from moeflow.bench.plan_plots import plot_rooflines as plot_rooflines
    from moeflow.bench.plan_validation import PlanValidation as PlanValidation
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
    from moeflow.engine.text.tokenizer import Tokenizer as Tokenizer
    from moeflow.llm import LLM as LLM
    from moeflow.models.registry import read_bare_config as read_bare_config
    from moeflow.models.registry import read_model_config as read_model_config
    from moeflow.planner.apply_plan import machine_notice as machine_notice
    from moeflow.planner.apply_plan import overruled as overruled
    from moeflow.planner.apply_plan import settings_from_plan as settings_from_plan
    from moeflow.planner.choices.packed_files import find_damage as find_damage
    from moeflow.planner.choices.packed_files import pack as pack
    from moeflow.planner.choices.packed_files import used_packed_weights_file as used_packed_weights_file
    from moeflow.planner.hardware.calibrate_device import measure_device as measure_device
    from moeflow.planner.hardware.host import host_resources as host_resources
    from moeflow.planner.hardware.this_machine import how_measured as how_measured
    from moeflow.planner.hardware.this_machine import known_machine as known_machine
    from moeflow.planner.hardware.this_machine import was_disturbed as was_disturbed
    from moeflow.planner.plan_text import what_to_expect as what_to_expect
    from moeflow.planner.planning import PlanRequest as PlanRequest
    from moeflow.planner.planning import plan_for as plan_for
    from moeflow.planner.planning import plan_for_start as plan_for_start
    from moeflow.planner.policy_map import num_map_points as num_map_points
    from moeflow.planner.policy_map import policy_map as policy_map
    from moeflow.planner.resolve import resolve as resolve
    from moeflow.planner.roofline_figures import roofline_figures as roofline_figures
    from moeflow.planner.settings import Settings as Settings
    from moeflow.server.config import ServerConfig as ServerConfig
    from moeflow.server.jobs.journal import Journal as Journal
    from moeflow.server.jobs.local import answer_file as answer_file
    from moeflow.server.jobs.local import check_input as check_input
    from moeflow.server.launch import serve as serve
    from moeflow.train.builtin import builtin_folder as builtin_folder
    from moeflow.train.builtin import builtin_source as builtin_source
    from moeflow.train.builtin import ensure_builtin_model as ensure_builtin_model
    from moeflow.train.routing_learning import ensure_profile as ensure_profile
    from moeflow.train.upcycled_checkpoint import UpcycleRecipe as UpcycleRecipe
    from moeflow.train.upcycling import upcycle as upcycle
    from moeflow.train.upcycling_quality import measure_quality as measure_quality

_WHOLE_MODULES = {"cpu": "moeflow.kernels.cpu.extension", "torch": "torch"}
_MODULES = {
    "BATCH_SIZES": "moeflow.bench.engine_run",
    "BatchJob": "moeflow.bench.batch_run",
    "BatchProgress": "moeflow.bench.batch_run",
    "EngineRun": "moeflow.bench.engine_run",
    "HttpTarget": "moeflow.bench.http_target",
    "Journal": "moeflow.server.jobs.journal",
    "LLM": "moeflow.llm",
    "PlanValidation": "moeflow.bench.plan_validation",
    "PlanRequest": "moeflow.planner.planning",
    "Progress": "moeflow.bench.serve_run",
    "ServerConfig": "moeflow.server.config",
    "PREFILL_LENS": "moeflow.bench.engine_run",
    "Settings": "moeflow.planner.settings",
    "Sweep": "moeflow.bench.serve_run",
    "Tokenizer": "moeflow.engine.text.tokenizer",
    "UpcycleRecipe": "moeflow.train.upcycled_checkpoint",
    "answer": "moeflow.bench.quality_run",
    "answer_file": "moeflow.server.jobs.local",
    "builtin_folder": "moeflow.train.builtin",
    "builtin_source": "moeflow.train.builtin",
    "check_address": "moeflow.bench.http_target",
    "check_input": "moeflow.server.jobs.local",
    "check_server": "moeflow.bench.serve_run",
    "compare": "moeflow.bench.quality_run",
    "resolve": "moeflow.planner.resolve",
    "describe_comparison": "moeflow.bench.quality_run",
    "ensure_builtin_model": "moeflow.train.builtin",
    "ensure_profile": "moeflow.train.routing_learning",
    "in_own_precision": "moeflow.bench.quality_run",
    "how_measured": "moeflow.planner.hardware.this_machine",
    "known_machine": "moeflow.planner.hardware.this_machine",
    "was_disturbed": "moeflow.planner.hardware.this_machine",
    "machine_notice": "moeflow.planner.apply_plan",
    "make_cases": "moeflow.bench.engine_run",
    "make_task": "moeflow.bench.quality_run",
    "measure_device": "moeflow.planner.hardware.calibrate_device",
    "host_resources": "moeflow.planner.hardware.host",
    "measure_quality": "moeflow.train.upcycling_quality",
    "open_checkpoint": "moeflow.checkpoint.open",
    "overruled": "moeflow.planner.apply_plan",
    "find_damage": "moeflow.planner.choices.packed_files",
    "pack": "moeflow.planner.choices.packed_files",
    "used_packed_weights_file": "moeflow.planner.choices.packed_files",
    "num_map_points": "moeflow.planner.policy_map",
    "plan_for": "moeflow.planner.planning",
    "plan_for_start": "moeflow.planner.planning",
    "plot_policy_map": "moeflow.bench.plan_plots",
    "plot_rooflines": "moeflow.bench.plan_plots",
    "policy_map": "moeflow.planner.policy_map",
    "roofline_figures": "moeflow.planner.roofline_figures",
    "plot_cache_replay": "moeflow.bench.plots",
    "plot_latencies": "moeflow.bench.plots",
    "plot_time_lines": "moeflow.bench.plots",
    "read_bare_config": "moeflow.models.registry",
    "read_model_config": "moeflow.models.registry",
    "question_lengths": "moeflow.bench.batch_run",
    "run_batch_job": "moeflow.bench.batch_run",
    "run_beside": "moeflow.bench.batch_run",
    "run_engines": "moeflow.bench.serve_run",
    "run_server": "moeflow.bench.serve_run",
    "serve": "moeflow.server.launch",
    "settings_from_plan": "moeflow.planner.apply_plan",
    "upcycle": "moeflow.train.upcycling",
    "what_to_expect": "moeflow.planner.plan_text",
    "with_policy": "moeflow.bench.serve_run",
}


def __getattr__(name: str) -> Any:
    if name in _WHOLE_MODULES:
        return _import(_WHOLE_MODULES[name])
    if name not in _MODULES:
        raise AttributeError(name)
    return getattr(_import(_MODULES[name]), name)


def _import(module: str) -> ModuleType:
    """Import a module whole: a Ctrl-C in the midst would be swallowed or printed by some callback of the importer."""
    with hold_interrupts():
        return importlib.import_module(module)
