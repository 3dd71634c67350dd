"""How much memory an engine may take, what beside weights it will hold, and whether the weights fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moeflow.core.engine_config import MemoryPlan
from moeflow.core.errors import CapacityError
from moeflow.core.model_config import ModelConfig
from moeflow.core.offload_config import CUDA
from moeflow.core.parallel_config import ParallelConfig
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.choices.batching_choice import Batching
from moeflow.planner.choices.expert_plan import ExpertPlan
from moeflow.planner.choices.memory_allowance import free_bytes
from moeflow.planner.choices.processor_choice import Reasons
from moeflow.planner.choices.rank_choice import RankMemory, count_ranks, possible_ranks
from moeflow.planner.choices.replica_choice import share_of
from moeflow.planner.choices.state_choice import num_state_slots
from moeflow.planner.choices.weight_choice import WeightChoice, instead_of
from moeflow.planner.costs.model_costs import ModelCosts
from moeflow.planner.costs.process_memory import PROCESS_BYTES, margin_bytes, planned_bytes, served_bytes
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.hardware.host import HostResources
from moeflow.settings.settings import Settings

with on_demand(__name__):
    from moeflow.planner.costs import gpu_work_space


class MemoryBudget:
    """One engine's memory: `free_bytes` for all of it, including the process and a pass's work space."""

    def __init__(
        self,
        settings: Settings,
        resources: HostResources,
        shape: ModelConfig,
        device: str,
        costs_of: Callable[[WeightChoice], ModelCosts],
    ) -> None:
        """Take what the user set and the machine has. `take_share` and `set_beside_weights` come first."""
        self._settings, self._resources, self._shape, self._device = settings, resources, shape, device
        self._costs_of = costs_of
        self._num_replicas = settings.num_replicas_here
        self._num_ranks = count_ranks(settings)
        self.parallel: ParallelConfig | None = None  # once it is chosen; until then, the most usual counts
        self.free_bytes = self.total_bytes = 0  # of this engine; of all replicas
        self.draft_bytes = 0  # of draft models; set before `set_beside_weights`
        self.predictor_bytes = 0  # of the network that predicts experts; likewise
        self.num_state_slots = 0  # of recurrent states
        self.prompt_cache_bytes = 0  # of buffers between KV blocks and disk; likewise
        self.process_bytes = PROCESS_BYTES
        self.work_bytes = 0

    def take_share(self, *, mapped_bytes: int = 0) -> None:
        """Set the memory this engine may use: of several, its share, where common memory counts once.

        `mapped_bytes`: weights that all map from one file. A limit covers the server's own processes, too.
        """
        self.total_bytes = total_bytes = free_bytes(self._settings, self._resources, self._device)
        if self._num_replicas == 1:
            self.free_bytes = total_bytes
            return
        is_limited = self._settings.memory_bytes is not None
        of_server = served_bytes(self._resources.process_bytes, self._shape) if is_limited else 0
        self.free_bytes = share_of(total_bytes, self._num_replicas, shared_bytes=mapped_bytes + of_server)

    def set_beside_weights(self, cpu_isa: str, batching: Batching) -> None:
        """Set what processes will hold, and a pass's work space; both matter to the byte only within a limit.

        Raises: CapacityError if recurrent states do not fit.
        """
        shares_prefixes = self._settings.prefix_caching
        self.num_state_slots = num_state_slots(
            self._shape, batching.max_num_seqs, self.free_bytes, shares_prefixes=shares_prefixes
        )
        if not cpu_isa or self._settings.memory_bytes is None:
            self.process_bytes, self.work_bytes = PROCESS_BYTES + self.beside_process, 0
            return
        is_served = self._settings.is_served
        held_bytes = planned_bytes(self._resources.process_bytes, self._shape, is_served=is_served)
        self.process_bytes = held_bytes + margin_bytes(is_served=is_served) + self.beside_process
        self.work_bytes = work_bytes(
            self._shape, num_tokens=batching.max_num_batched_tokens, num_sampled=batching.max_num_seqs
        )

    def count_passes_on_gpu(self, weights: WeightChoice, batching: Batching, reasons: Reasons) -> None:
        """Set the work space of passes on a GPU that holds the model, with captured ones; follows `set_beside_weights`.

        PROCESS_BYTES stay for CUDA itself.
        """
        if self._device == "cpu":
            return
        costs, most = self._costs_of(weights), batching.max_num_seqs
        passes = gpu_work_space.pass_bytes(costs, num_tokens=batching.max_num_batched_tokens, num_sampled=most)
        graphs = gpu_work_space.graph_bytes(costs, most)
        self.work_bytes = passes + graphs
        reasons.append(("work space", f"{format_bytes(passes)} for a pass, {format_bytes(graphs)} for CUDA graphs"))

    @property
    def beside_process(self) -> int:
        """What engines hold in any case beside weights, keys and values: drafts, predictors, states, buffers."""
        state_bytes = self.num_state_slots * self._shape.state_bytes
        return self.draft_bytes + self.predictor_bytes + self.prompt_cache_bytes + state_bytes

    @property
    def num_here(self) -> int:
        """Processes of this machine that compute: one if ranks are spread over machines."""
        return 1 if self._settings.is_spread else self._num_ranks

    @property
    def overhead_bytes(self) -> int:
        """What these hold beside weights, keys and values."""
        return self.num_here * (self.process_bytes + self.work_bytes)

    def weight_bytes(self, weights: WeightChoice) -> int:
        """Return the bytes of the weights that this machine has: of all its ranks."""
        return sum(self._here(weights, self.parallel))

    def left(self, weights: WeightChoice, parallel: ParallelConfig | None = None) -> float:
        """Return the bytes that weights and process leave; negative if they do not fit. None: as ranks share now."""
        return self.free_bytes - sum(self._here(weights, parallel or self.parallel)) - self.overhead_bytes

    def _here(self, weights: WeightChoice, parallel: ParallelConfig | None) -> Sequence[int]:
        """Return the bytes of the weights of each rank here; devices are as full as the fullest one."""
        costs = self._costs_of(weights)
        held = RankMemory.of(costs, parallel or next(iter(possible_ranks(self._settings, costs)), None))
        return held.here if self._device == "cpu" else [max(held.weight_bytes)] * self._num_ranks

    def check_weights(self, weights: WeightChoice, plan: ExpertPlan | None) -> int:
        """Return the bytes of the weights that must be in memory. Raises: CapacityError if they do not fit."""
        num_bytes = self.weight_bytes(weights) if plan is None else plan.min_bytes
        if num_bytes + self.overhead_bytes > self.free_bytes:
            if plan is not None:
                raise CapacityError(
                    f"{format_bytes(plan.resident_bytes)} of the weights must be in memory, and {plan.min_slots} "
                    f"experts at a time: with the process that is {format_bytes(num_bytes + self.overhead_bytes)} in "
                    f"{weights.name}{self._drafts()}, but {format_bytes(self.free_bytes)} are allowed. Raise the "
                    f"memory limit (--memory), or use {instead_of(weights.matrices)}"
                )
            need = f"{format_bytes(num_bytes)} in {weights.name} and the process {format_bytes(self.overhead_bytes)}"
            have = format_bytes(self.free_bytes)
            if self._device != "cpu":
                raise CapacityError(
                    f"the weights need {need} more, but {have} of {self._device} are free: use --device cpu, or "
                    f"--device {CUDA}:SIZE, which streams experts that do not fit"
                )
            raise CapacityError(
                f"the weights need {need} more{self._drafts()}, but {have} of memory are free: use "
                f"{instead_of(weights.matrices)}, or free memory{self._hint()}"
            )
        return num_bytes

    def left_for_kv(self, weight_bytes: int) -> int:
        """Return the bytes from which each rank here may take its keys and values, beside weights of so many."""
        return max(self.free_bytes - weight_bytes - self.overhead_bytes, 0) // self.num_here

    def memory_plan(self, weight_bytes: int) -> MemoryPlan | None:
        """Return what a limit is divided into; None: there is none."""
        if self._settings.memory_bytes is None:
            return None
        return MemoryPlan(
            limit_bytes=self.free_bytes,
            process_bytes=self.process_bytes,
            weight_bytes=weight_bytes,
            work_bytes=self.work_bytes,
            is_served=self._settings.is_served,
        )

    def _drafts(self) -> str:
        if not self.draft_bytes:
            return ""
        return f" ({format_bytes(self.draft_bytes)} of it for models that draft: a smaller --speculator needs less)"

    def _hint(self) -> str:
        is_alone = self._num_ranks == 1 and self._settings.memory_bytes is None
        can_stream = is_alone and self._shape.routing.num_experts and extension.is_available()
        return "; or set a limit (--memory) and have experts come from disk" if can_stream else ""
