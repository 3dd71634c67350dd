"""A batch job on the virtual clock: a prefill, then decoding steps, by a pipeline and under a policy.

Costs are those of `planner/costs/task_costs.py`. A step is one of many: its first layer's weights are on the device at
its beginning and at its end. Steps get longer with the context, nearly linearly, so three of them represent all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from moeflow.core.attention_config import HeadSizes
from moeflow.core.errors import ConfigError
from moeflow.core.hardware import DEVICE, Machine
from moeflow.core.plan import Policy, Workload
from moeflow.pipeline.catalog import Pipeline
from moeflow.pipeline.task import Task
from moeflow.pipeline.tensor_parallel import sharing_layers
from moeflow.pipeline.zero_inference import zero_inference
from moeflow.planner.costs.cost_model import CostModel, IntegerPolicy
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.task_costs import TaskCost, TaskShape, compute_cost, decode_shape, task_cost
from moeflow.planner.simulator.time_line import TimeLine
from moeflow.planner.simulator.virtual_clock import run_virtually

MAX_STAGES: Final = 100_000  # micro-batches times layers of a step: some million tasks


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """A job to simulate."""

    pipeline: Pipeline
    machine: Machine
    costs: ModelCosts
    workload: Workload
    policy: Policy

    def __post_init__(self) -> None:
        """Raise ConfigError where a step would have more tasks than a machine's memory holds."""
        number, layers = self.policy.num_micro_batches, self.costs.shape.num_layers
        if number * layers > MAX_STAGES:
            raise ConfigError(
                f"{number:,} micro-batches of {layers} layers exceed the simulator's limit of {MAX_STAGES:,} in all. "
                "Take larger micro-batches, or fewer sequences"
            )

    def decode_step(self, context: float) -> TimeLine:
        """Return a decoding step of sequences with so many tokens each."""
        layers, number = self.costs.shape.num_layers, self.policy.num_micro_batches
        hosted = self.policy.experts_on_host
        make_tasks = self.pipeline.make_sharing_tasks if hosted else self.pipeline.make_tasks
        assert make_tasks is not None, f"the host computes no experts in {self.pipeline.name}"
        tasks = make_tasks(layers, number, is_warm=True, wraps=True)
        num_pages = number if self.pipeline.is_paged else 1
        return self._run(
            tasks,
            self._sizes,
            lambda size, layer: decode_shape(
                self.costs, size, context, layer=layer, num_pages=num_pages, hosted=hosted
            ),
        )

    @cached_property
    def prefill(self) -> TimeLine:
        """A pass over prompts, computed on the device with any pipeline."""
        choice = IntegerPolicy.of(self.policy)
        number, tokens = self._model.num_prompt_micro_batches(choice), self._model.prompt_tokens(choice)
        attention = self._model.prompt_attention(tokens)
        tasks = zero_inference(
            self.costs.shape.num_layers,
            number,
            is_warm=self._num_prompt_passes > 1,
            wraps=self._num_prompt_passes > 1,
            stores_kv=self.pipeline.has_kv_on_host,
        )
        return self._run(
            tasks,
            [self.policy.prompts] * number,
            lambda _, layer: TaskShape(
                costs=self.costs,
                num_tokens=tokens,
                attention=attention,
                layer=layer,
                hosted=self.policy.experts_on_host,
            ),
        )

    @cached_property
    def prefill_s(self) -> float:
        """Seconds until each sequence has its first token."""
        return self._num_prompt_passes * (self.prefill.seconds + self._hosted_prompts_s) + self._head_s

    @property
    def _hosted_prompts_s(self) -> float:
        """The host's seconds for its experts in a pass over prompts; the device waits for its sums."""
        if not self.policy.experts_on_host:
            return 0.0
        choice = IntegerPolicy.of(self.policy)
        whole_s = self._model.host_experts_s(self._model.prompt_tokens(choice))
        whole_s *= self._model.num_prompt_micro_batches(choice)
        return whole_s * self.policy.experts_on_host

    @cached_property
    def middle_step(self) -> TimeLine:
        """The middle step, which represents all steps in pictures and shares."""
        return self.decode_step(self.workload.mean_context)

    @cached_property
    def decode_s(self) -> float:
        """Seconds of all steps; the first token comes from the prefill."""
        num_steps = self.workload.gen_len - 1
        first, last = self.workload.prompt_len + 1, self.workload.prompt_len + num_steps
        if num_steps <= 0:
            return 0.0
        ends = [self.decode_step(context).seconds for context in (first, last)]
        return num_steps * ((ends[0] + 4 * self.middle_step.seconds + ends[1]) / 6 + self._head_s)

    @cached_property
    def tokens_per_s(self) -> float:
        """Generated tokens over prefill and decoding."""
        return self.policy.batch_size * self.workload.gen_len / (self.prefill_s + self.decode_s)

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes in each tier at the peak."""
        return memory_of(self.machine, self.costs, self.workload, self.policy)

    @cached_property
    def fits(self) -> dict[str, bool]:
        """Whether each used tier is large enough."""
        used = {tier: num_bytes for tier, num_bytes in self.memory.items() if num_bytes > 0}
        slack = 1 + 1e-9  # of shares that fill a tier
        return {tier: need <= self.machine.level(tier).capacity_bytes * slack for tier, need in used.items()}

    @cached_property
    def _sizes(self) -> list[int]:
        """The sequences of each micro-batch; the last may have fewer."""
        policy = self.policy
        full, rest = divmod(policy.batch_size, policy.micro_batch)
        return [policy.micro_batch] * full + ([rest] if rest else [])

    @cached_property
    def _head_s(self) -> float:
        """The device's seconds for the choice of tokens after a pass."""
        heads = [self.costs.head(size) for size in self._sizes]
        return compute_cost(self.machine, DEVICE, heads, self.policy).seconds

    @cached_property
    def _num_prompt_passes(self) -> int:
        return self._model.num_prompt_passes(IntegerPolicy.of(self.policy))

    @cached_property
    def _model(self) -> CostModel:
        return CostModel(self.machine, self.costs, self.workload, num_devices=self.policy.num_devices)

    def _run(
        self, tasks: Iterator[Task], sizes: Sequence[int], shape_of: Callable[[int, int | None], TaskShape]
    ) -> TimeLine:
        if self.policy.num_devices > 1:
            tasks = sharing_layers(tasks)
        shape = self.costs.shape
        kinds: dict[tuple[bool, HeadSizes], int] = {}
        kind_of: dict[int | None, int] = {
            layer: kinds.setdefault(
                (layer in shape.feed_forward.dense_layers, shape.attention.heads_of(layer)), len(kinds)
            )
            for layer in range(shape.num_layers)
        }
        known: dict[tuple[str, int, int | None], TaskCost] = {}  # tasks of one op, size and kind of layer cost the same

        def cost(task: Task) -> TaskCost:
            is_page = task.op.startswith("weights_")
            size = 0 if is_page or task.micro_batch is None else sizes[task.micro_batch]
            key = (task.op, size, kind_of.get(task.layer))
            if key not in known:
                known[key] = task_cost(task.op, self.machine, shape_of(size, task.layer), self.policy)
            return known[key]

        return TimeLine(run_virtually(tasks, cost))


def make_policy(
    pipeline: Pipeline,
    machine: Machine,
    costs: ModelCosts,
    workload: Workload,
    *,
    batch_size: int,
    micro_batch: int,
    resident_share: float | None = None,
    num_devices: int = 1,
) -> Policy:
    """Return a pipeline's policy; a share of None: as many weights on the device as fit.

    Raises: ConfigError if the machine has no device, or the share is out of range.
    """
    if not machine.has(DEVICE):
        raise ConfigError(
            f"{machine.name} has no device to stream weights to: take a machine with one, or "
            "moeflow simulate serve, which computes on the host"
        )
    policy = Policy(
        batch_size=batch_size,
        micro_batch=micro_batch,
        attention_on_device=not pipeline.attends_on_host,
        ffn_on_device=True,
        weights_on_device=resident_share or 0.0,
        kv_on_device=0.0 if pipeline.has_kv_on_host else 1.0,
        chunk_tokens=batch_size * workload.prompt_len,
        prompts=micro_batch,
        num_devices=num_devices,
    )
    if resident_share is not None:
        if not 0 <= resident_share <= 1:
            raise ConfigError(f"{resident_share:.0%} of the weights cannot be resident; give a number from 0 to 100")
        return policy
    empty = memory_of(machine, costs, workload, policy)[DEVICE]
    full = memory_of(machine, costs, workload, replace(policy, weights_on_device=1.0))[DEVICE]
    free = machine.level(DEVICE).capacity_bytes - empty
    return replace(policy, weights_on_device=min(max(free / (full - empty), 0.0), 1.0))


def memory_of(machine: Machine, costs: ModelCosts, workload: Workload, policy: Policy) -> dict[str, float]:
    """Return the bytes that a policy takes of each tier at its peak."""
    model = CostModel(machine, costs, workload, num_devices=policy.num_devices, keeps_prompts=False)
    return model.memory_of(policy)
