"""What passes take on a device that this machine plays: the engine's micro-batches and tasks, on a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from moeflow.core.hardware import DEVICE, MemoryLevel
from moeflow.core.plan import Policy
from moeflow.engine.host_share import HostShare
from moeflow.engine.micro_batches import group_counts
from moeflow.pipeline.catalog import PIPELINES
from moeflow.pipeline.task import Task
from moeflow.planner.cost_model import CostModel
from moeflow.planner.played_costs import Part, PlayedCost, PlayedCosts
from moeflow.planner.roofline import processor_of, work_seconds
from moeflow.simulator.shared_processor import SharedProcessor
from moeflow.simulator.time_line import TimeLine
from moeflow.simulator.virtual_clock import run_virtually

SOME_LAYERS: Final = (4, 8)  # that are timed instead of all: layers are alike
LEARNING_PASSES: Final = 3  # until the host's share is found: one of each layer, and two by what it then takes
HOSTED: Final = (0.0, 0.25, 0.5, 1.0)  # of the experts that are streamed: what the host may compute of them

Sequences = Sequence[tuple[int, int]]  # (tokens in the pass, tokens before it)


@dataclass(frozen=True)
class PlayedPasses:
    """Times passes of one model; `model.machine` is what is played, by a processor that really is `real`."""

    model: CostModel
    real: MemoryLevel
    copy_bytes_per_s: float
    num_cores: int

    def time_line(self, pipeline: str, policy: Policy, sequences: Sequences) -> TimeLine:
        """Return a pass of some sequences, up to the last layer."""
        parts = [Part.of(part) for part in group_counts(sequences, policy.micro_batch)]
        num_layers = self.model.costs.shape.num_layers
        return self._time_line(pipeline, policy, parts, num_layers, self._hosted(pipeline, policy, parts))

    def _hosted(self, pipeline: str, policy: Policy, parts: Sequence[Part]) -> float:
        """Return how many experts of a layer the host computes, found as the engine does: by what passes have taken."""
        most, shape = max(self.choices_of_hosted(pipeline, policy)), self.model.costs.shape
        if not most:
            return 0.0
        num_layers = min(max(SOME_LAYERS), shape.num_layers)
        has_experts = [layer not in shape.dense_layers for layer in range(shape.num_layers)]
        share = HostShare(self.model.costs, has_experts, round(most))
        hosted = 0.0
        for _ in range(LEARNING_PASSES):
            _tell(share, self._time_line(pipeline, policy, parts, num_layers, hosted), parts, hosted)
            share.begin_pass(round(sum(it.num_tokens for it in parts)), sum(it.num_read for it in parts))
            hosted = share.num_hosted / sum(has_experts)
        return hosted

    def choices_of_hosted(self, pipeline: str, policy: Policy) -> list[float]:
        """Return how many experts of a layer the host may compute: 0, and some of those that are streamed.

        On a device as fast as its host, the engine finds that both compete for the same cores, and leaves it at 0.
        """
        costs, played = self.model.costs, self.model.machine.level(DEVICE)
        is_paced = played.read_bytes_per_s < self.real.read_bytes_per_s
        if not (is_paced and costs.num_moe_layers and PIPELINES[pipeline].make_sharing_tasks):
            return [0.0]
        streamed = costs.layers_bytes * (1 - policy.weights_on_device) / costs.num_moe_layers / costs.expert_bytes
        return sorted({share * min(round(streamed), costs.shape.num_experts) for share in HOSTED})

    def _time_line(
        self, pipeline: str, policy: Policy, parts: Sequence[Part], num_layers: int, num_hosted: float
    ) -> TimeLine:
        costs = self.costs(pipeline, policy, len(parts), num_hosted)
        known: dict[tuple[str, int], PlayedCost] = {}

        def cost_of(task: Task) -> PlayedCost:
            is_page = task.micro_batch is None or task.op.startswith("weights_")
            key = (task.op, 0 if is_page or task.micro_batch is None else task.micro_batch)
            if key not in known:
                known[key] = costs.of(task.op, parts[key[1]])
            return known[key]

        how = PIPELINES[pipeline]
        make_tasks = how.make_sharing_tasks if num_hosted and how.make_sharing_tasks else how.make_tasks
        tasks = make_tasks(num_layers, len(parts), is_warm=num_layers > 1, wraps=num_layers > 1)
        return TimeLine(run_virtually(tasks, cost_of, timer=SharedProcessor(self.num_cores)))

    def seconds(self, pipeline: str, policy: Policy, sequences: Sequences) -> float:
        """Return how long a pass takes, tokens drawn for all sequences."""
        few, many = SOME_LAYERS
        layers, after_s = self.model.costs.shape.num_layers, self.after_s(len(sequences))
        if layers <= 2 * many:
            return self.time_line(pipeline, policy, sequences).seconds + after_s
        parts = [Part.of(part) for part in group_counts(sequences, policy.micro_batch)]
        hosted = self._hosted(pipeline, policy, parts)
        short, long = (self._time_line(pipeline, policy, parts, number, hosted).seconds for number in SOME_LAYERS)
        return long + (long - short) / (many - few) * (layers - many) + after_s

    def decode_s(self, pipeline: str, policy: Policy) -> float:
        """Return a decoding step's seconds, in the middle of the answers."""
        return self.seconds(pipeline, policy, [(1, int(self.model.workload.mean_context))] * policy.batch_size)

    def prompts_s(self, pipeline: str, policy: Policy, num_prompts: int) -> float:
        """Return the seconds of the passes until each of some requests has its first token."""
        passes = list(prompt_passes(num_prompts, self.model.workload.prompt_len, policy.chunk_tokens))
        ends = [self.seconds(pipeline, policy, one) for one in {0: passes[0], len(passes) - 1: passes[-1]}.values()]
        full_s = self.seconds(pipeline, policy, passes[-2]) if len(passes) > 2 else 0.0
        return ends[0] + (len(passes) - 2) * (ends[0] + full_s) / 2 + ends[1] if len(ends) > 1 else ends[0]

    def costs(self, pipeline: str, policy: Policy, num_parts: int, num_hosted: float = 0.0) -> PlayedCosts:
        """Return the costs of the tasks of a pass in so many micro-batches; the host has so many experts of a layer."""
        num_pages = num_parts if PIPELINES[pipeline].is_paged else 1
        model = self.model
        return PlayedCosts(model.costs, model.machine, self.real, self.copy_bytes_per_s, policy, num_pages, num_hosted)

    def after_s(self, num_sampled: float) -> float:
        """Return what follows the last layer."""
        head, processor = self.model.costs.head(num_sampled), processor_of(self.real)
        head_s = max(work_seconds(self.model.machine.level(DEVICE), head), work_seconds(self.real, head))
        return head_s + processor.pass_s + num_sampled * processor.token_s


def _tell(share: HostShare, line: TimeLine, parts: Sequence[Part], num_hosted: float) -> None:
    """Tell what a pass has taken with so many experts of a layer on the host, as the engine's lanes would."""
    for one in (one for ones in line.lanes.values() for one in ones):
        seconds = one.end_s - one.start_s
        part = parts[one.task.micro_batch or 0]
        if one.task.op == "weights_to_device":
            share.uploaded(one.cost.num_bytes, seconds)
        elif one.task.op == "cpu_attention":
            share.attended(part.num_read, seconds)
        elif one.task.op == "host_experts":
            share.computed(num_hosted, part.num_tokens, seconds)


def prompt_passes(num_prompts: int, length: int, most_tokens: int) -> Iterator[Sequences]:
    """Yield the passes that prompts of one length take, all of which wait; who has had his first token goes on."""
    done, total = 0, num_prompts * length
    while done < total:
        sequences = [(1, length)] * min(done // length, most_tokens - 1)
        room = most_tokens - len(sequences)
        while room and done < total:
            start = done % length
            count = min(length - start, room)
            sequences.append((count, start))
            room -= count
            done += count
        yield sequences
