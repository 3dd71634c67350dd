"""A stand-in for the model in engine processes: a pass takes a fixed time, without work for the processor."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import EngineConfig
from moeflow.core.engine_messages import ExpertStats, ModelInfo
from moeflow.core.request import Request
from moeflow.engine import engine
from moeflow.engine.model_runner import PassResult
from moeflow.engine.sampler import SampledToken
from moeflow.engine.verification import Verified
from moeflow.kv.block_tables import BlockTables

PASS_S = "SLEEPING_PASS_S"  # the environment variable with the seconds of a pass
TOKEN_ID = 80  # a letter


class SleepingRunner:
    """See `Runner`."""

    def __init__(self, config: EngineConfig, pass_s: float) -> None:
        self._pass_s = pass_s
        scheduler = config.scheduler
        self.info = ModelInfo(
            name=config.model_name,
            path=config.model_path,
            model_type="mixtral",
            vocab_size=258,
            max_model_len=scheduler.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            eos_token_ids=(1,),
            num_layers=1,
            hidden_size=32,
            num_experts=4,
            top_k=2,
            num_parameters=1,
            num_active_parameters=1,
            weight_format="float32",
            device="cpu",
            kv_capacity_tokens=scheduler.num_blocks * scheduler.block_size,
            created=int(time.time()),
        )

    def run(self, batch: Batch) -> PassResult:
        """Sleep until the pass is over; every sampling request gets the same token."""
        end_s = time.monotonic() + self._pass_s
        brought = {entry.request: Verified([SampledToken(TOKEN_ID)], []) for entry in batch.entries if entry.samples}
        time.sleep(max(end_s - time.monotonic(), 0.0))
        return PassResult(brought, {})

    def expect(self, request: Request) -> None:
        """Nothing to prepare."""

    def take_late(self, wait_s: float) -> list[tuple[BatchEntry, Verified]]:
        """Nothing comes late."""
        del wait_s
        return []

    def classify(self, vector: object) -> list[float]:
        """There are no classes."""
        raise NotImplementedError

    def settle(self, blocks: BlockTables) -> None:
        """There is no memory to return."""

    def check_ranks(self) -> None:
        """There are no ranks."""

    def expert_stats(self) -> ExpertStats:
        """There are no experts."""
        return ExpertStats()

    def close(self) -> None:
        """There is nothing to close."""


def install() -> None:
    """Have engines of this process sleep."""

    def load(config: EngineConfig, progress: Callable[[int, int], None] | None = None) -> SleepingRunner:
        del progress
        return SleepingRunner(config, float(os.environ[PASS_S]))

    engine.load_runner = load  # type: ignore[assignment]
