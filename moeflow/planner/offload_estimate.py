"""What to expect of a configuration that streams weights to a device: the cost model on a machine with that device."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from moeflow.core.engine_config import BLOCK_SIZE, EngineConfig
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import OffloadConfig
from moeflow.core.plan import Estimate, Plan, Policy, TierUse, Workload
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.costs.cost_model import DEVICE_RESERVE_BYTES, PROCESS_BYTES, CostModel
from moeflow.planner.estimate import machine_reasons
from moeflow.planner.forecast import MEMORY_UNCERTAINTY, forecast


class OffloadEstimator(msgspec.Struct, frozen=True):
    """Predicts for any batch and lengths, as `Estimator` does for a host."""

    config: EngineConfig
    shape: ModelConfig
    machine: Machine  # with the device

    @property
    def memory_limits(self) -> dict[str, int]:
        """There are none: a limit of memory does not go with such a device."""
        return {}

    def costs(self, workload: Workload) -> CostModel:
        """Return the costs of a workload."""
        costs, number = costs_of(self.shape, self.config), self.machine.num_devices
        return CostModel(self.machine, costs, workload, process_bytes=PROCESS_BYTES, num_devices=number)

    def policy(self, batch_size: int, max_tokens: int) -> Policy:
        """Return the policy that the configuration carries out for a batch."""
        assert self.config.offload is not None
        workload = Workload(prompt_len=max(max_tokens - 1, 1), gen_len=1, max_prompt_len=max_tokens)
        pass_tokens = self.config.scheduler.max_num_batched_tokens
        return offload_policy(self.config.offload, self.costs(workload), batch_size, pass_tokens)

    def complete(self, plan: Plan) -> Plan:
        """Return a plan of the configuration with the forecast for its workload."""
        policy = self.policy(self.config.scheduler.max_num_seqs, plan.workload.max_tokens)
        expected = forecast(self.costs(plan.workload), policy, self.memory_limits)
        memory = (self._without_reserve(used) if used.tier == DEVICE else used for used in expected.memory)
        return replace(
            plan,
            machine=self.machine.name,
            machine_identity=self.machine.identity,
            forecast=replace(expected, memory=tuple(memory)),
            reasons=(*plan.reasons, *machine_reasons(self.machine)),
        )

    def _without_reserve(self, used: TierUse) -> TierUse:
        """Return the use of an emulated device, which has no driver that takes memory; a GPU's stays."""
        if not self._is_emulated:
            return used
        peak = max(used.peak_bytes.value - DEVICE_RESERVE_BYTES, 0.0)
        return msgspec.structs.replace(used, peak_bytes=Estimate.within(peak, MEMORY_UNCERTAINTY))

    @property
    def _is_emulated(self) -> bool:
        assert self.config.offload is not None
        return self.config.offload.emulated is not None

    def peak_bytes(self, batch_size: int, prompt_len: int, gen_len: int) -> float:
        """Return the main memory in use while so many requests run; an emulated device's memory is a part of it."""
        workload = Workload(prompt_len=prompt_len, gen_len=gen_len, max_prompt_len=prompt_len)
        used = self.costs(workload).memory_of(self.policy(batch_size, workload.max_tokens))
        return used[RAM] + (used[DEVICE] - DEVICE_RESERVE_BYTES if self._is_emulated else 0)


def _prompts(offload: OffloadConfig, prompt_len: int) -> int:
    """Return how many prompts of a length a micro-batch has: as many as its tokens and its window allow."""
    number = offload.prompt_micro_batch_tokens // prompt_len
    if offload.window_blocks:
        number = min(number, offload.window_blocks // -(-prompt_len // BLOCK_SIZE))
    return max(number, 1)


def offload_policy(offload: OffloadConfig, model: CostModel, batch_size: int, pass_tokens: int) -> Policy:
    """Return the policy that a configuration carries out for a batch, in passes of so many tokens.

    A host that may compute experts takes as many as are best.
    """
    costs, on_device = model.costs, not OFFLOADING[offload.pipeline].attends_on_host
    num_experts = max(costs.shape.routing.num_experts, 1)
    streamed = costs.experts_bytes * (1 - offload.num_resident_experts / num_experts)
    if not offload.num_resident_experts:
        streamed += costs.num_dense_layers * costs.dense_values * costs.formats.weight_bytes
    alone = Policy(
        batch_size=batch_size,
        micro_batch=min(offload.micro_batch_tokens, batch_size),
        attention_on_device=on_device,
        ffn_on_device=True,
        weights_on_device=1 - min(streamed / costs.layers_bytes, 1.0),
        kv_on_device=offload.num_resident_kv_layers / costs.shape.num_layers if on_device else 0.0,
        chunk_tokens=pass_tokens,
        prompts=_prompts(offload, model.workload.prompt_len),
        num_devices=model.num_devices,
    )
    most = num_experts - offload.num_resident_experts if OFFLOADING[offload.pipeline].make_sharing_tasks else 0
    asked = offload.num_hosted_experts
    numbers = range(most + 1) if asked is None else [min(asked, most)]
    policies = [replace(alone, experts_on_host=number / num_experts) for number in numbers]
    return min(policies, key=lambda policy: model.predict(policy).decode_s)
