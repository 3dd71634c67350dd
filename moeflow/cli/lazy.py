"""Names that take seconds to import, fetched when a verb first uses them: so every --help answers at once.

Write `late.LLM`, not `from moeflow.cli.lazy import LLM`. A new heavy name needs one import below.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moeflow.kernels.whole_import import import_whole

if TYPE_CHECKING:  # for the type checker only
    import torch

    from moeflow.bench.batch_run import BatchJob, question_lengths, run_batch_job, run_beside
    from moeflow.bench.engine_run import BATCH_SIZES, PREFILL_LENS, EngineRun, make_cases
    from moeflow.bench.http_target import HttpTarget, check_address
    from moeflow.bench.plan_plots import plot_policy_map, plot_rooflines
    from moeflow.bench.plan_validation import PlanValidation
    from moeflow.bench.plots import plot_cache_replay, plot_latencies, plot_time_lines
    from moeflow.bench.quality_run import answer, compare, describe_comparison, in_own_precision, make_task
    from moeflow.bench.serve_run import RunCalls, Sweep, check_server, on_and_off, run_engines, run_server, with_policy
    from moeflow.checkpoint.hub.cache_layout import repositories
    from moeflow.checkpoint.hub.cached_models import cached_models, plan_removal, unfinished_bytes
    from moeflow.checkpoint.hub.local_models import find_model, hub_cache, local_path
    from moeflow.checkpoint.hub.model_name import no_name, parse_model_name
    from moeflow.checkpoint.hub.pull import pull
    from moeflow.checkpoint.hub.remote_headers import HEADERS_PREFIX, remote_headers
    from moeflow.checkpoint.identity import called
    from moeflow.checkpoint.open import open_checkpoint
    from moeflow.engine.lending import LendSettings, lend
    from moeflow.engine.recorded_forecast import recorded_forecast
    from moeflow.kv.disk.folder_usage import clear_folder, folder_bytes, folder_usage
    from moeflow.llm import LLM
    from moeflow.models.downloaded import describe
    from moeflow.models.finite import find_not_finite
    from moeflow.models.loading import outline
    from moeflow.models.registry import read_bare_config, read_model_config
    from moeflow.planner.apply_plan import apply_plan, changes, machine_notice, settings_beside
    from moeflow.planner.choices.packed_files import carry_predictor, find_damage, pack, used_packed_weights_file
    from moeflow.planner.choices.prompt_cache_choice import default_prompt_folder
    from moeflow.planner.choices.served_name import served_name
    from moeflow.planner.figures.policy_map import num_map_points, policy_map
    from moeflow.planner.figures.roofline_figures import roofline_figures
    from moeflow.planner.hardware.device_rates import device_rates, expert_rates
    from moeflow.planner.hardware.gpu_figures import figures_file, gpu_figures
    from moeflow.planner.hardware.host import host_resources
    from moeflow.planner.hardware.this_machine import how_measured, known_machine, was_disturbed
    from moeflow.planner.made_files import made_files
    from moeflow.planner.plan_text import speed_and_memory, what_to_expect
    from moeflow.planner.planning import PlanRequest, plan_for, plan_for_start
    from moeflow.planner.resolve import resolve
    from moeflow.processes.nodes.join_settings import JoinSettings, LeftError
    from moeflow.processes.nodes.keeper import keep_engines
    from moeflow.server.config import ServerConfig
    from moeflow.server.jobs.journal import ResultJournal
    from moeflow.server.jobs.local import answer_file, check_input, read_bodies
    from moeflow.server.launch import PlannedModel, serve, serve_several
    from moeflow.server.logs import start_logs
    from moeflow.settings.settings import Settings
    from moeflow.settings.values import read_settings
    from moeflow.text.token_tree_dot import to_dot
    from moeflow.text.tokenizer import Tokenizer
    from moeflow.text.tokenizer_files import read_gguf
    from moeflow.train.builtin import builtin_folder, builtin_source, with_dense_source
    from moeflow.train.calibration_text import calibration_text
    from moeflow.train.classifiers.classifier import ClassifierTexts, train_classifier
    from moeflow.train.experts.texts import measured_text, named_files
    from moeflow.train.experts.training import train_experts
    from moeflow.train.importance_learning import ensure_importance
    from moeflow.train.making_process import make_builtin_apart
    from moeflow.train.predictors.distillation import train_predictor
    from moeflow.train.routing_learning import ensure_profile
    from moeflow.train.speculators.distillation import train_speculators
    from moeflow.train.upcycle_recipe import UpcycleRecipe
    from moeflow.train.upcycling import upcycle
    from moeflow.train.upcycling_quality import measure_quality

_WHOLE_MODULES = {"cpu": "moeflow.kernels.cpu.extension", "torch": "torch"}


@functools.cache
def modules() -> dict[str, str]:
    """Return the module of each name that is imported above."""
    block = next(node for node in ast.parse(Path(__file__).read_bytes()).body if isinstance(node, ast.If))
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    if name in _WHOLE_MODULES:
        return _import(_WHOLE_MODULES[name])
    if name not in modules():
        raise AttributeError(name)
    return getattr(_import(modules()[name]), name)


def _import(module: str) -> ModuleType:
    """Import a module, and have the garbage collector pass over what stays."""
    is_there = module in sys.modules
    imported = import_whole(module)
    if not is_there:
        gc.freeze()
    return imported
