"""The best way to run a model on a device that is smaller than it: pipeline, micro-batch, batch, and what stays there.

Every choice of a grid is reckoned, with the room for experts that the engine itself would find (`plan_offload`): a pass
takes at least what device, host or link take, and what the processor that plays them all really computes and copies.
The best go over the virtual clock, which knows where a pipeline waits and how lanes disturb each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Final

from moeflow.core.engine_config import SchedulerConfig
from moeflow.core.errors import CapacityError
from moeflow.core.hardware import DEVICE, RAM, Machine
from moeflow.core.offload_config import EmulatedDeviceConfig, OffloadConfig
from moeflow.core.plan import Policy
from moeflow.core.units import format_bytes
from moeflow.engine.offload_plan import OffloadWishes, plan_offload
from moeflow.engine.played_passes import PlayedPasses
from moeflow.engine.settings import BLOCK_SIZE, OFFLOADED_MAX_RUNNING
from moeflow.memory.offloaded_kv import NUM_WINDOWS
from moeflow.pipeline.catalog import PIPELINES, Pipeline
from moeflow.planner.cost_model import DEVICE_COMPUTE, FROM_DEVICE, HOST_COMPUTE, TO_DEVICE, CostModel, Prediction
from moeflow.planner.plan_maker import too_slow
from moeflow.planner.played_costs import Part
from moeflow.planner.policy_search import KEPT_SPEED, Aim
from moeflow.planner.roofline import work_seconds

MOST_SEQUENCES: Final = 4 * OFFLOADED_MAX_RUNNING
SEARCHED: Final = ("cgopipe", "flexgen", "zero-inference")  # the others attend where cgopipe does, and wait more
PASS_TOKENS: Final = (128, 512, 1024, 2048, 4096)  # of prompts; the more, the fewer passes weights are streamed for
MICRO_BATCHES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NUM_MICRO_BATCHES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 22, 32, 48, 64)
MOST_SIMULATED: Final = 12
WORTH_IT: Final = 0.995  # of what fewer micro-batches take: each costs some work that no model counts
_SHARED: Final = (
    ("route", DEVICE_COMPUTE),
    ("offload_routed", FROM_DEVICE),
    ("host_experts", HOST_COMPUTE),
    ("load_sums", TO_DEVICE),
    ("experts", DEVICE_COMPUTE),
)
_WEIGHT_OPS: Final = ("weights_to_pinned", "weights_to_device")
_HALVES: Final = 4  # of a layer's streamed experts: two on the device, two that are staged


@dataclass(frozen=True)
class OffloadChoice:
    """One way to do it, and what it is expected to bring."""

    policy: Policy
    config: OffloadConfig
    prediction: Prediction

    def cost(self, goal: str) -> float:
        """Return what is to be small: seconds a step for latency, else seconds a generated token."""
        return self.prediction.decode_s if goal == "latency" else 1 / self.prediction.tokens_per_s


@dataclass(frozen=True)
class OffloadSearch:
    """Looks for the best choice on a machine that plays a device: `model.machine`; `host` is the one that plays it."""

    model: CostModel
    host: Machine
    device: EmulatedDeviceConfig
    copy_bytes_per_s: float  # of one core of the host
    num_cores: int
    is_coarse: bool = False  # every other point of the grid, and no virtual clock: for comparisons

    def best(self, aim: Aim) -> OffloadChoice:
        """Return the best choice. Raises: CapacityError if nothing fits, or the rate cannot be reached."""
        found = self._all(aim)
        if aim.goal == "latency" and aim.num_sequences is None:
            found = self._few_enough(found)
        found.sort(key=lambda one: (float(f"{one.cost(aim.goal):.3g}"), one.policy.num_micro_batches))
        if aim.goal == "memory":
            enough = [it for it in found if it.cost(aim.goal) * KEPT_SPEED <= found[0].cost(aim.goal)]
            found = [min(enough, key=lambda one: sum(one.prediction.memory.values()))]
        return found[0] if self.is_coarse else self._simulated(found, aim.goal)

    def predict(self, policy: Policy, config: OffloadConfig) -> Prediction:
        """Return what a choice brings if nothing waits that need not."""
        workload, batch = self.model.workload, policy.batch_size
        busy, decode_s = self._decode(policy, config.pipeline)
        prefill_busy, prefill_s = self._prefill(policy, config.pipeline, batch)
        return Prediction(
            decode_s=decode_s,
            prefill_s=prefill_s,
            first_token_s=self._prefill(policy, config.pipeline, 1)[1],
            tokens_per_s=batch * workload.gen_len / (prefill_s + (workload.gen_len - 1) * decode_s),
            busy=busy,
            prefill_busy=prefill_busy,
            memory=self._memory(policy, config),
        )

    def _all(self, aim: Aim) -> list[OffloadChoice]:
        """Return every choice that fits. Raises: CapacityError if none does."""
        found: list[OffloadChoice] = []
        missing: CapacityError | None = None
        for name, (mu, batch) in ((name, sizes) for name in SEARCHED for sizes in self._sizes(aim)):
            for pass_tokens in sorted({max(it, batch) for it in self._grid(PASS_TOKENS)}):
                try:
                    found.append(self._choice(name, mu, batch, pass_tokens))
                except CapacityError as error:
                    missing = missing or error
                    break  # more tokens a pass take more room
        if not found:
            raise missing or CapacityError("no number of sequences is left to choose from")
        return found

    def _sizes(self, aim: Aim) -> Iterator[tuple[int, int]]:
        """Yield micro-batch and batch, small ones first."""
        most = min(aim.num_sequences or aim.max_sequences, MOST_SEQUENCES)
        if aim.num_sequences is not None:
            yield from ((mu, most) for mu in sorted({ceil(most / count) for count in self._grid(NUM_MICRO_BATCHES)}))
            return
        for mu in self._grid(MICRO_BATCHES):
            yield from ((mu, mu * count) for count in self._grid(NUM_MICRO_BATCHES) if mu * count <= most)

    def _grid(self, points: tuple[int, ...]) -> tuple[int, ...]:
        return points[::2] if self.is_coarse else points

    def _choice(self, name: str, mu: int, batch: int, pass_tokens: int) -> OffloadChoice:
        """Return a choice with as many experts on the device as fit. Raises: CapacityError if too few do."""
        costs, workload = self.model.costs, self.model.workload
        limits = SchedulerConfig(
            block_size=BLOCK_SIZE,
            num_blocks=batch * ceil(workload.max_tokens / BLOCK_SIZE),
            max_model_len=workload.max_tokens,
            max_running=batch,
            max_batch_tokens=pass_tokens,
        )
        device = replace(self.device, capacity_bytes=self.model.machine.level(DEVICE).capacity_bytes)
        wishes = OffloadWishes(device=device, pipeline=name, micro_batch_tokens=mu)
        config = plan_offload(wishes, costs, limits)
        streamed = costs.experts_bytes * (1 - config.num_resident_experts / max(costs.shape.num_experts, 1))
        policy = Policy(
            batch_size=batch,
            micro_batch=mu,
            attention_on_device=not PIPELINES[name].attends_on_host,
            ffn_on_device=True,
            weights_on_device=1 - streamed / costs.layers_bytes,
            kv_on_device=0.0 if PIPELINES[name].has_kv_on_host else 1.0,
            chunk_tokens=pass_tokens,
        )
        need, have = self._memory(policy, config)[RAM], self.model.machine.level(RAM).capacity_bytes
        if need > have:
            raise CapacityError(
                f"{batch} sequences of {workload.max_tokens} tokens, and a model all of which stays in memory beside "
                f"the device, need {format_bytes(need)} of memory ({format_bytes(have)} there): take a smaller weight "
                "format (--quantize), fewer sequences (--batch-size), or more memory"
            )
        return OffloadChoice(policy, config, self.predict(policy, config))

    def _few_enough(self, found: list[OffloadChoice]) -> list[OffloadChoice]:
        """Return, for latency, those of one sequence; under a rate, those that keep up with it."""
        workload = self.model.workload
        if not workload.rate:
            fewest = min(one.policy.batch_size for one in found)
            return [one for one in found if one.policy.batch_size == fewest]
        enough = [it for it in found if it.prediction.tokens_per_s >= workload.rate * workload.gen_len]
        if not enough:
            raise too_slow(workload.rate, max(it.prediction.tokens_per_s for it in found) / workload.gen_len)
        return enough

    def _simulated(self, found: list[OffloadChoice], goal: str) -> OffloadChoice:
        """Return the best by the virtual clock of choices that are sorted by what they take at least."""
        best: OffloadChoice | None = None
        for one in found[:MOST_SIMULATED]:
            if best is not None and one.cost(goal) >= best.cost(goal):
                break
            timed = self._on_virtual_clock(one)
            if best is None or timed.cost(goal) < best.cost(goal) * WORTH_IT:
                best = timed
        assert best is not None, "there is a choice"
        return best

    def _on_virtual_clock(self, one: OffloadChoice) -> OffloadChoice:
        workload, policy, name = self.model.workload, one.policy, one.config.pipeline
        decode_s = self.passes.decode_s(name, policy)
        prefill_s = self.passes.prompts_s(name, policy, policy.batch_size)
        timed = replace(
            one.prediction,
            decode_s=decode_s,
            prefill_s=prefill_s,
            first_token_s=self.passes.prompts_s(name, policy, 1),
            tokens_per_s=policy.batch_size * workload.gen_len / (prefill_s + (workload.gen_len - 1) * decode_s),
        )
        return replace(one, prediction=timed)

    # What a pass takes:

    def _decode(self, policy: Policy, pipeline: str) -> tuple[dict[str, float], float]:
        context = self.model.workload.mean_context
        size, number = policy.micro_batch, policy.num_micro_batches
        part = Part(size, size, size * context, size * context, size * context)
        return self._pass(policy, pipeline, number, part, policy.batch_size)

    def _prefill(self, policy: Policy, pipeline: str, num_prompts: int) -> tuple[dict[str, float], float]:
        """Return what all prompts take, in passes that each stream the weights."""
        length = self.model.workload.prompt_len
        total = num_prompts * length
        num_passes = ceil(total / policy.chunk_tokens)
        tokens = total / num_passes
        number = max(min(ceil(tokens / policy.micro_batch), ceil(tokens / length)), 1)
        work = self.model.costs.prefill_attention(num_prompts, length, policy.chunk_tokens)
        parts = num_passes * number
        seen = total * (length + 1) / 2 / parts
        read = work.num_bytes / self.model.costs.kv_layer_bytes / parts
        part = Part(num_prompts / parts, tokens / number, seen, read, 0.0)
        busy, seconds = self._pass(policy, pipeline, number, part, num_prompts / num_passes)
        return {name: it * num_passes for name, it in busy.items()}, seconds * num_passes

    def _pass(
        self, policy: Policy, pipeline: str, number: int, part: Part, num_sampled: float
    ) -> tuple[dict[str, float], float]:
        """Return how long each resource works in a pass of so many micro-batches, and the whole pass at least."""
        hosted = self.passes.choices_of_hosted(pipeline, policy)
        found = [self._shared_pass(policy, pipeline, number, part, num_sampled, some) for some in hosted]
        return min(found, key=lambda one: one[1])

    def _shared_pass(
        self, policy: Policy, pipeline: str, number: int, part: Part, num_sampled: float, num_hosted: float
    ) -> tuple[dict[str, float], float]:
        """Return the same if the host has so many experts of a layer."""
        how, layers = PIPELINES[pipeline], self.model.costs.shape.num_layers
        costs = self.passes.costs(pipeline, policy, number, num_hosted)
        times = [(lane, layers * number, costs.of(op, part)) for op, lane in _ops(how, is_shared=num_hosted > 0)]
        weights = [(TO_DEVICE, layers * costs.num_pages, costs.of(op, part)) for op in _WEIGHT_OPS]
        busy = dict.fromkeys((DEVICE_COMPUTE, HOST_COMPUTE, TO_DEVICE, FROM_DEVICE), 0.0)
        for lane, count, cost in times + weights:
            busy[lane] += count * cost.seconds
        busy[DEVICE_COMPUTE] += work_seconds(self.model.machine.level(DEVICE), self.model.costs.head(num_sampled))
        # A micro-batch goes from place to place: alone, it has each of them wait for the others.
        chain_s = sum(busy.values()) - sum(count * cost.seconds for _, count, cost in weights)
        real_s = sum(count * (cost.kernel_s + cost.core_s / self.num_cores) for _, count, cost in times + weights)
        return busy, max(*busy.values(), chain_s / number, real_s + self.passes.after_s(num_sampled))

    def _memory(self, policy: Policy, config: OffloadConfig) -> dict[str, float]:
        """Return the bytes of each tier; what the device holds is played in memory."""
        costs, workload = self.model.costs, self.model.workload
        tokens = policy.batch_size * ceil(workload.max_tokens / BLOCK_SIZE) * BLOCK_SIZE
        half = costs.layers_bytes * (1 - policy.weights_on_device) / costs.shape.num_layers
        windows = NUM_WINDOWS * config.window_blocks * BLOCK_SIZE * costs.kv_layer_bytes
        on_device = costs.embedding_bytes + costs.layers_bytes * policy.weights_on_device + 2 * half + windows
        on_device += costs.activation_bytes(policy.chunk_tokens) + tokens * costs.kv_bytes * policy.kv_on_device
        ram = self.model.process_bytes + costs.model_bytes + _HALVES * half + windows + tokens * costs.kv_bytes
        return {RAM: ram, DEVICE: on_device}

    @cached_property
    def passes(self) -> PlayedPasses:
        """What times passes."""
        # A device that is no slower than what plays it becomes faster with it.
        is_paced = bool(self.device.speeds.host_bytes)
        real = (self.host if is_paced else self.model.machine).level(RAM)
        return PlayedPasses(self.model, real, self.copy_bytes_per_s, self.num_cores)


def _ops(pipeline: Pipeline, *, is_shared: bool) -> list[tuple[str, str]]:
    """Return what is done with a micro-batch in a layer: (op, the resource that does it)."""
    ops = [("pre_attention", DEVICE_COMPUTE), *(_SHARED if is_shared else [("post_attention", DEVICE_COMPUTE)])]
    if pipeline.attends_on_host:
        return [
            *ops,
            ("offload_qkv", FROM_DEVICE),
            ("cpu_attention", HOST_COMPUTE),
            ("load_hidden", TO_DEVICE),
        ]
    kept = [("load_kv", TO_DEVICE), ("store_kv", FROM_DEVICE)] if pipeline.has_kv_on_host else []
    return [*ops, ("device_attention", DEVICE_COMPUTE), *kept]
