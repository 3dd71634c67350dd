"""What to expect of a configuration before it is loaded: the cost model on this machine as it was measured before.

Searches nothing and measures nothing: a few milliseconds.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Final

from moeflow.checkpoint.open import open_checkpoint
from moeflow.core.cache_dir import cache_folder
from moeflow.core.engine_config import EngineConfig
from moeflow.core.hardware import RAM, Machine
from moeflow.core.model_config import ModelConfig
from moeflow.core.plan import Policy, Workload
from moeflow.core.units import format_bytes
from moeflow.kernels.cpu import extension
from moeflow.models.registry import read_model_config
from moeflow.planner.costs.cost_model import BLOCK_TOKENS, CostModel, Prediction
from moeflow.planner.costs.model_costs import Formats, ModelCosts
from moeflow.planner.costs.process_memory import ENGINE_BYTES, planned_bytes
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile
from moeflow.planner.costs.work_space import work_bytes
from moeflow.planner.hardware.this_machine import how_measured, known_machine, was_disturbed
from moeflow.planner.known_routing import known_routing

# Of reading experts with computing: a step waits for what its own routers chose, while a prefill, which needs all,
# reads ahead. Measured with `bench engine --memory` on two Zen 5 cores.
HOST_OVERLAP: Final = 0.0
HOST_PREFILL_OVERLAP: Final = 0.6

PROMPT_TOKENS: Final = 512  # whose first token is spoken of
ANSWER_TOKENS: Final = 128
GUESS: Final = "faster if its routers choose alike, which `moeflow pack` learns"
RENEW: Final = "`moeflow plan --recalibrate` measures it again, while nothing else runs"
HINT: Final = "how fast this will be is not known yet: `moeflow plan` measures this machine, in some twenty seconds"


@dataclass(frozen=True)
class Expectations:
    """Predicts what a configuration does on a machine, for any batch and lengths."""

    config: EngineConfig
    shape: ModelConfig
    machine: Machine
    is_served: bool = False
    routing: RoutingProfile = EVEN_ROUTING

    def predict(self, batch_size: int, prompt_len: int, gen_len: int) -> Prediction:
        """Return what so many requests of these lengths would take, and what they need of each memory."""
        workload = Workload(prompt_len=prompt_len, gen_len=gen_len, max_prompt_len=prompt_len)
        return self.costs(workload).predict(self.policy(batch_size, workload.max_tokens))

    def costs(self, workload: Workload) -> CostModel:
        """Return the costs of a workload."""
        return CostModel(
            self.machine,
            self._costs,
            workload,
            routing=self.routing,
            overlap=HOST_OVERLAP,
            prefill_overlap=HOST_PREFILL_OVERLAP,
            process_bytes=self._process_bytes,
            chunk_tokens=self.config.scheduler.max_num_batched_tokens,
        )

    def policy(self, batch_size: int, max_tokens: int) -> Policy:
        """Return what the configuration means for a batch: its keys and values take the room of experts."""
        on_disk = 0.0
        if (experts := self.config.experts) is not None:
            total = self._costs.num_moe_layers * self.shape.num_experts
            tokens = batch_size * ceil(max_tokens / BLOCK_TOKENS) * BLOCK_TOKENS
            taken = tokens * self._costs.kv_bytes + (self.config.memory.work_bytes if self.config.memory else 0)
            num_slots = max(experts.num_slots - ceil(taken / experts.slab_bytes), experts.min_slots)
            on_disk = max(1 - num_slots / total, 0.0)
        return Policy(
            batch_size=batch_size,
            micro_batch=batch_size,
            attention_on_device=False,
            ffn_on_device=False,
            experts_on_disk=on_disk,
            chunk_tokens=self.config.scheduler.max_num_batched_tokens,
        )

    @property
    def max_bytes(self) -> int:
        """What the processes hold at most."""
        if self.config.memory is not None:
            return self.config.memory.limit_bytes
        return int(self._process_bytes + self._costs.model_bytes + self.config.kv_cache_bytes)

    def peak_bytes(self, batch_size: int, prompt_len: int, gen_len: int) -> float:
        """Return what is held while so many requests of these lengths run."""
        return self.predict(batch_size, prompt_len, gen_len).memory[RAM]

    @property
    def _costs(self) -> ModelCosts:
        return ModelCosts(self.shape, self._formats)

    @property
    def _formats(self) -> Formats:
        config = self.config
        return Formats(
            matrices=config.weight_format,
            embeddings=config.embedding_format,
            kv=config.kv_dtype,
            routers=config.router_format,
        )

    @property
    def _process_bytes(self) -> int:
        if self.config.memory is not None:
            return self.config.memory.process_bytes + self.config.memory.work_bytes
        limits = self.config.scheduler
        held = planned_bytes(ENGINE_BYTES, self.shape, is_served=self.is_served)
        return held + work_bytes(self.shape, num_tokens=limits.max_num_batched_tokens, num_sampled=limits.max_num_seqs)


def expectations(
    config: EngineConfig, machine: Machine, routing: RoutingProfile = EVEN_ROUTING, *, is_served: bool = False
) -> Expectations:
    """Return what predicts for a configuration. Raises: CheckpointError if the model cannot be read."""
    with closing(open_checkpoint(config.model_path)) as checkpoint:
        shape = read_model_config(checkpoint)
    return Expectations(config, shape, machine, is_served=is_served, routing=routing)


def can_be_predicted(config: EngineConfig) -> bool:
    """Say whether measurements of this machine hold: the CPU kernels compute, as well as they can."""
    return config.offload is None and bool(config.cpu_isa) and config.cpu_isa == extension.isa_name()


def what_to_expect(config: EngineConfig, cache_dir: Path | None, *, is_served: bool = False) -> str:
    """Return a line for people: speed, time to first token and memory; how to learn them if this machine was never
    measured; nothing if they cannot be told. Raises: CheckpointError.
    """
    if not can_be_predicted(config):
        return ""
    machine = known_machine(cache_folder(cache_dir), config.num_threads)
    if machine is None:
        return HINT
    routing = EVEN_ROUTING if config.experts is None else known_routing(config.model_path, cache_dir)
    expected = expectations(config, machine, routing, is_served=is_served)
    limits = config.scheduler
    prompt_len = max(min(PROMPT_TOKENS, limits.max_model_len // 2), 1)
    gen_len = max(min(ANSWER_TOKENS, limits.max_model_len - prompt_len), 1)
    alone = expected.predict(1, prompt_len, gen_len)
    speeds = f"{_rounded(1 / alone.decode_s)} tokens/s at batch 1"
    most = min(limits.max_num_seqs, limits.num_blocks * limits.block_size // (prompt_len + gen_len))
    if most > 1:
        together = expected.predict(most, prompt_len, gen_len)
        speeds += f" and {_rounded(most / together.decode_s)} at {most}"
    memory = format_bytes(expected.max_bytes)
    said = f"expect some {speeds}, first token of {prompt_len} after {alone.first_token_s:.2g} s, at most {memory}"
    is_guess = config.experts is not None and not routing.decode
    how = how_measured(machine) + (f": {RENEW}" if was_disturbed(machine) else "")
    return "; ".join(part for part in (said, GUESS if is_guess else "", how) if part)


def _rounded(number: float) -> str:
    """Write a number with two digits that count: more would promise too much."""
    return f"{float(f'{number:.2g}'):g}" if number < 100 else f"{round(number, -1):.0f}"
