"""A runner around the fake model: the whole engine without weights."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import msgspec

from moeflow.core.batch import Batch, BatchEntry
from moeflow.core.engine_config import EngineConfig, SchedulerConfig
from moeflow.core.engine_messages import ExpertStats, TokenLogprobs
from moeflow.core.errors import GroupError
from moeflow.engine.engine import Engine
from moeflow.engine.model_runner import PassResult
from moeflow.engine.observing.observed_model import ObservedModel
from moeflow.engine.observing.residency import Residency
from moeflow.engine.observing.routing_tap import RoutingTap
from moeflow.engine.sampler import SampledToken
from moeflow.engine.verification import Verified
from moeflow.pipeline.runtime.recording import Recording
from tests.scheduler.fake_model import VOCAB_SIZE, FakeModel
from tests.shapes import ENGINE, INFO

EOS = 0


class FakeRunner:
    def __init__(self, config: EngineConfig) -> None:
        self.model = FakeModel(config.scheduler.block_size)
        self.fail_next: Exception | None = None
        self.batches: list[Batch] = []
        self.is_rank_gone = False
        self.info = msgspec.structs.replace(
            INFO,
            vocab_size=VOCAB_SIZE,
            max_model_len=config.scheduler.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            kv_capacity_tokens=config.scheduler.num_blocks * config.scheduler.block_size,
        )

    def classify(self, vector) -> list[float]:
        raise NotImplementedError("the fake model has no classes")

    def settle(self, blocks) -> None:
        pass

    def expect(self, request):
        pass

    def check_ranks(self) -> None:
        if self.is_rank_gone:
            raise GroupError("rank 1 of the engine is gone")

    def expert_stats(self) -> ExpertStats:
        return ExpertStats()

    def observed(self) -> ObservedModel:
        without_experts = SimpleNamespace(moe_blocks=lambda: (), packed_layers=None)
        return ObservedModel(
            layers=[],
            num_encoder_layers=0,
            num_experts=0,
            top_k=0,
            groups=[],
            tap=RoutingTap(without_experts, None, [], 0),
            is_counted=False,
            not_counted="the fake model has no experts",
            residency=Residency(ENGINE),
            disk=None,
            waited_s=lambda: 0.0,
            spans=self,
        )

    def recording(self, num_passes):
        return Recording(clock_ns=0, num_passes=0, rows=[], layers=[], times=[])

    def end_recording(self):
        pass

    def close(self) -> None:
        self.is_closed = True

    def take_late(self, wait_s: float) -> list[tuple[BatchEntry, Verified]]:
        return []

    def run(self, batch: Batch) -> PassResult:
        self.batches.append(batch)
        brought = self.model.run(batch)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return PassResult(
            {r: Verified([SampledToken(token) for token in one.tokens], one.kept) for r, one in brought.items()},
            {
                entry.request: [
                    TokenLogprobs(entry.request.prompt_token_ids[position + 1], -float(position), 1, [])
                    for position in range(entry.start, min(entry.stop, len(entry.request.prompt_token_ids) - 1))
                ]
                for entry in batch.entries
                if entry.request.sampling.prompt_logprobs is not None and not entry.request.output_token_ids
            },
        )


def scheduler_config(**changes) -> SchedulerConfig:
    values = {
        "block_size": 4,
        "num_blocks": 16,
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        **changes,
    }
    return SchedulerConfig(**values)


def make_engine(**changes) -> tuple[Engine, FakeRunner]:
    config = dataclasses.replace(ENGINE, scheduler=scheduler_config(**changes))
    runner = FakeRunner(config)
    return Engine(config, runner), runner
