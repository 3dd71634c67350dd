"""What predicts for a plan that is being served, made from the plan, the model's headers and kept measurements.

Measures nothing: what was never measured here is unknown, with the reason.
"""

from __future__ import annotations

import msgspec

from moeflow.core.cache_dir import cache_folder
from moeflow.core.hardware import Machine
from moeflow.core.offload_config import CUDA
from moeflow.core.plan import Plan
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.costs.cost_model import BLOCK_TOKENS
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.estimate import Estimator
from moeflow.planner.hardware.host import host_resources
from moeflow.planner.hardware.this_machine import known_machine
from moeflow.planner.known_routing import known_routing
from moeflow.planner.model_files import opened_model
from moeflow.settings.settings import Settings, from_plain

with on_demand(__name__):
    from moeflow.planner.hardware import gpu_figures

_NOT_MEASURED = "this machine's speed is not known here; `moeflow plan` measures it"
_ELSEWHERE = "the engines are on other machines, whose speed is not known here"


class ServedEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """A plan, what its model costs, and what predicts for it."""

    plan: Plan
    costs: ModelCosts
    routing: RoutingProfile
    machine: Machine | None  # as it was measured
    estimator: Estimator | None
    why_no_machine: str = ""  # empty: it is known
    why_no_estimator: str = ""  # likewise

    def step_s(self, num_sequences: int, context: float) -> float | None:
        """Return the predicted seconds of a decoding step at a mean context; None: nothing predicts."""
        if self.estimator is None:
            return None
        length = max(round(context) - 1, 1)
        return self.estimator.predict(num_sequences, length, 1).decode_s

    def first_token_s(self, prompt_len: int) -> float | None:
        """Return the predicted seconds until the first token of a request alone; None: nothing predicts."""
        if self.estimator is None or prompt_len < 1:
            return None
        return self.estimator.predict(1, prompt_len, 1).first_token_s

    def memory_bytes(self, num_kv_tokens: int) -> float | None:
        """Return the predicted main memory while keys and values of so many tokens are kept; None: nothing predicts."""
        if self.estimator is None:
            return None
        one = self.estimator.peak_bytes(1, 1, 1)
        return one + max(num_kv_tokens - BLOCK_TOKENS, 0) * self.costs.kv_bytes

    def reachable_experts(self, num_tokens: float, *, is_decoding: bool) -> float:
        """Return how many experts of a layer passes of so many tokens are expected to use."""
        routing = self.costs.shape.routing
        even = self.costs.experts(num_tokens).num_bytes / self.costs.expert_bytes if routing.num_experts else 0.0
        share = self.routing.decode_distinct if is_decoding else self.routing.prefill_distinct
        return even * share(num_tokens)


def served_estimate(plan: Plan) -> ServedEstimate:
    """Return what is known of a plan's speed. Blocks: for a moment; seconds if a GPU's driver is installed.

    Raises: CheckpointError if the model's headers cannot be read.
    """
    settings = from_plain(plan.settings)
    with opened_model(plan.config.model_path, needs_weights=True) as (checkpoint, shape):
        routing = known_routing(checkpoint, settings.cache_dir)
    machine = _machine(plan, settings)
    why_not = _why_no_estimator(plan, machine)
    estimator = None
    if machine is not None and not why_not:
        estimator = Estimator(
            plan.config,
            shape,
            machine,
            is_served=settings.is_served,
            routing=routing,
            num_replicas=plan.num_replicas,
        )
    return ServedEstimate(
        plan=plan,
        costs=costs_of(shape, plan.config),
        routing=routing or EVEN_ROUTING,
        machine=machine,
        estimator=estimator,
        why_no_machine="" if machine is not None else _ELSEWHERE if plan.node_replicas is not None else _NOT_MEASURED,
        why_no_estimator=why_not,
    )


def _machine(plan: Plan, settings: Settings) -> Machine | None:
    """Return this machine as it was measured before, with the GPU that computes."""
    if plan.node_replicas is not None:
        return None
    here = host_resources(plan.config.device, settings.cache_dir)
    machine = known_machine(cache_folder(settings.cache_dir), settings.num_threads or here.num_cores)
    if machine is None or plan.config.device.split(":")[0] != CUDA:
        return machine
    figures = gpu_figures.known_figures(gpu_figures.figures_file(settings.cache_dir, here, plan.config.device))
    number = 1 if plan.config.parallel is None else plan.config.parallel.num_ranks
    return None if figures is None else gpu_figures.with_gpu(machine, figures, number)


def _why_no_estimator(plan: Plan, machine: Machine | None) -> str:
    if machine is None:
        return _ELSEWHERE if plan.node_replicas is not None else _NOT_MEASURED
    if plan.forecast is None:
        return "the plan predicts nothing for this model on this device"
    if plan.config.offload is not None:
        return "the plan predicts its own batch alone, where weights are streamed to a device"
    return ""
