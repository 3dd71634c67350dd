"""What to expect of a configuration: the cost model on a machine whose speed is known.

Searches nothing and measures nothing: a few milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import msgspec

from moeflow.core.engine_config import EngineConfig
from moeflow.core.hardware import RAM, Machine
from moeflow.core.hybrid_config import HybridConfig
from moeflow.core.model_config import ModelConfig
from moeflow.core.plan import Plan, Policy, Workload
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.offload_plan import costs_of
from moeflow.planner.costs.cost_model import BLOCK_TOKENS, CostModel, Prediction, overlaps
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.process_memory import CUDA_BYTES, ENGINE_BYTES, planned_bytes
from moeflow.planner.costs.rank_costs import ALONE, Sharing
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import sampled_bytes, work_bytes
from moeflow.planner.forecast import disk_reasons, forecast
from moeflow.planner.hardware.this_machine import how_measured
from moeflow.planner.resident_experts import min_slots, num_slots, share_on_disk

with on_demand(__name__):
    from moeflow.planner.costs import hybrid_costs
    from moeflow.planner.hardware import device_rates


class Estimator(msgspec.Struct, frozen=True):
    """Predicts what a configuration of a host does on a machine, for any batch and lengths."""

    config: EngineConfig
    shape: ModelConfig
    machine: Machine
    is_served: bool = False
    routing: RoutingProfile | None = None
    num_replicas: int = 1  # engines of the configuration; the forecast is for one, while all are at work

    def predict(self, batch_size: int, prompt_len: int, gen_len: int) -> Prediction:
        """Return the time of so many requests of these lengths, and their use of each memory."""
        workload = Workload(prompt_len=prompt_len, gen_len=gen_len, max_prompt_len=prompt_len)
        return self.costs(workload).predict(self.policy(batch_size, workload.max_tokens))

    def complete(self, plan: Plan) -> Plan:
        """Return a plan of the configuration with the forecast for its workload."""
        limits, tokens = self.config.scheduler, plan.workload.max_tokens
        has_room_for = limits.num_blocks // ceil(tokens / limits.block_size)
        number = max(min(limits.max_num_seqs, has_room_for), 1)
        model, policy = self.costs(plan.workload), self.policy(limits.max_num_seqs, tokens)
        policy = replace(policy, batch_size=number, micro_batch=number)
        places = disk_reasons(model, policy)
        reasons = (*plan.reasons, *places, *machine_reasons(self.machine, self.config.hybrid))
        return replace(
            plan,
            machine=self.machine.name,
            machine_identity=self.machine.identity,
            forecast=forecast(model, policy, self.memory_limits, maps_weights=bool(self.config.packed_file)),
            reasons=reasons,
        )

    def costs(self, workload: Workload) -> CostModel:
        """Return the costs of a workload."""
        if (hybrid := self.config.hybrid) is not None:
            return hybrid_costs.HybridCosts(
                self.machine,
                self._costs,
                workload,
                routing=self.routing or EVEN_ROUTING,
                process_bytes=self._process_bytes + CUDA_BYTES,
                host_format=hybrid.cpu_weight_format,
                num_host_slots=None if self.config.experts is None else self.config.experts.num_slots,
            )
        return host_costs(
            self._costs,
            self.machine,
            workload,
            routing=self.routing or EVEN_ROUTING,
            process_bytes=self._process_bytes,
            chunk_tokens=self.config.scheduler.max_num_batched_tokens,
            sharing=Sharing(parallel=self.config.parallel, num_replicas=self.num_replicas),
        )

    def policy(self, batch_size: int, max_tokens: int) -> Policy:
        """Return the configuration's effect on a batch: its keys and values take memory from experts."""
        tokens_a_pass, hybrid = self.config.scheduler.max_num_batched_tokens, self.config.hybrid
        experts, total = self.config.experts, self._costs.num_moe_layers * self.shape.routing.num_experts
        on_disk = 0.0
        if hybrid is not None:
            number = hybrid.num_gpu_experts
            if experts is not None:
                on_disk = share_on_disk(number * self._costs.num_moe_layers + experts.num_slots, total)
            return hybrid_costs.hybrid_policy_of(self._costs, batch_size, number, tokens_a_pass, on_disk=on_disk)
        if experts is not None:
            tokens = batch_size * ceil(max_tokens / BLOCK_TOKENS) * BLOCK_TOKENS
            taken = min(tokens * self._costs.kv_bytes, self.config.kv_cache_bytes)
            taken += batch_size * sampled_bytes(self.shape)
            left_bytes, most = self._slots_bytes - taken, experts.num_slots
            on_disk = share_on_disk(num_slots(left_bytes, experts.slab_bytes, most, least=experts.min_slots), total)
        return Policy(
            batch_size=batch_size,
            micro_batch=batch_size,
            attention_on_device=False,
            ffn_on_device=False,
            experts_on_disk=on_disk,
            chunk_tokens=tokens_a_pass,
        )

    @property
    def _slots_bytes(self) -> int:
        """What experts from disk may take while requests decode, and keys and values take nothing."""
        memory = self.config.memory
        assert memory is not None, "experts come from disk within a limit"
        return memory.limit_bytes - memory.weight_bytes - memory.process_bytes - self._work_bytes

    def peak_bytes(self, batch_size: int, prompt_len: int, gen_len: int) -> float:
        """Return the memory in use while so many requests of these lengths run."""
        return self.predict(batch_size, prompt_len, gen_len).memory[RAM]

    @property
    def memory_limits(self) -> dict[str, int]:
        """What the user allows of each tier, where that is less than there is."""
        return {} if self.config.memory is None else {RAM: self.config.memory.limit_bytes}

    @property
    def _costs(self) -> ModelCosts:
        return costs_of(self.shape, self.config)

    @property
    def _process_bytes(self) -> int:
        """Memory besides weights, keys and values, without sampling."""
        if self.config.memory is not None:
            held = self.config.memory.process_bytes
        else:
            held = planned_bytes(ENGINE_BYTES, self.shape, is_served=self.is_served)
            held += sum(draft.num_bytes for draft in self.config.draft_models)
        return held + self._work_bytes

    @property
    def _work_bytes(self) -> int:
        return work_bytes(self.shape, num_tokens=self.config.scheduler.max_num_batched_tokens, num_sampled=0)


def host_costs(
    costs: ModelCosts,
    machine: Machine,
    workload: Workload,
    *,
    routing: RoutingProfile,
    process_bytes: int,
    chunk_tokens: int,
    sharing: Sharing = ALONE,
) -> CostModel:
    """Return the costs of a host that computes everything, in passes of so many tokens.

    `process_bytes`: memory besides weights, keys and values, and sampling.
    """
    overlap, prefill_overlap = overlaps(machine)
    return CostModel(
        machine,
        costs,
        workload,
        routing=routing,
        overlap=overlap,
        prefill_overlap=prefill_overlap,
        process_bytes=process_bytes,
        sampled_bytes=sampled_bytes(costs.shape),
        min_experts=min_expert_share(costs) if sharing.parallel is None else 1.0,  # ranks read none from disk
        chunk_tokens=chunk_tokens,
        sharing=sharing,
    )


def min_expert_share(costs: ModelCosts) -> float:
    """Return the share of experts without which the engine computes no pass."""
    num_experts = costs.num_moe_layers * costs.shape.routing.num_experts
    return min_slots(costs.shape.routing.top_k, num_experts) / num_experts if num_experts else 0.0


def machine_reasons(machine: Machine, hybrid: HybridConfig | None = None) -> list[tuple[str, str]]:
    """Return how a machine's speed is known, except for data sheets; and the rates by which experts are shared."""
    how = how_measured(machine)
    reasons = [("machine", how)] if how else []
    if hybrid is not None:
        reasons.append(("hybrid rates", device_rates.hybrid_rates(machine, hybrid.cpu_weight_format)))
    return reasons
