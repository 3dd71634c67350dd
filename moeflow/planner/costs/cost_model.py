"""Time and memory of passes under a policy. Source: MoE-Lightning 4.2, equations 12 to 14.

`IntegerPolicy` has the whole numbers and places of a policy. For each choice of them, the time of every resource and
the bytes in every tier are linear in shares. The shares are those of weights, keys and values on the device, and of
experts that a device's host computes. Without a device, they are those of experts on disk and of cache misses. The same
`LinearCost` serves predictions and searches.

Beyond the paper: prefill; a disk under RAM, behind an expert cache; tensor parallelism; kernel efficiencies; hosts
without a device, which compute sequentially. Times use average lengths, memory the longest. A machine with a device
uses no disk: its pipelines stream from main memory. Each pass over prompts streams all weights that do not stay on the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, expm1, log1p
from typing import Final

import msgspec

from moeflow.core.hardware import DEVICE, DISK, PINNED, RAM, Link, Machine, MemoryLevel
from moeflow.core.plan import Policy, Workload
from moeflow.core.units import MIB
from moeflow.kernels.on_demand import on_demand
from moeflow.planner.costs.disk_waits import DiskRates, ExpertReads
from moeflow.planner.costs.hit_curve import HitCurve
from moeflow.planner.costs.model_costs import KernelWork, ModelCosts, expected_distinct
from moeflow.planner.costs.rank_costs import ALONE, RankedLayers, Sharing
from moeflow.planner.costs.roofline import processor_of, work_seconds
from moeflow.planner.costs.routing_profile import EVEN_ROUTING, RoutingProfile

with on_demand(__name__):
    from moeflow.planner.costs import gpu_work_space

HOST_COMPUTE: Final = "host"
DEVICE_COMPUTE: Final = "device"
TO_DEVICE: Final = "link to device"
FROM_DEVICE: Final = "link from device"
DISK_OFFLOAD: Final = "disk"
_WINDOWS: Final = 2  # micro-batches whose keys and values are on the device
_FASTER: Final = 0.95  # a ratio of times that is worth memory
_BOUND: Final = "waits: "  # begins the names of bounds on seconds that are no resource's

PROCESS_BYTES: Final = 512 * MIB  # Python, torch and the work space of a pass
DEVICE_RESERVE_BYTES: Final = 768 * MIB  # CUDA's context, the allocator's slack, kernels' work space
BLOCK_TOKENS: Final = 16  # of a KV block: a sequence's last is half empty on average


class LinearCost(msgspec.Struct, frozen=True):
    """The sum of each term times its share; `const` counts once.

    Shares on a device: `weights` r_w, `kv` r_c, `hosted` experts that its host computes. Shares without a device:
    `disk` experts on disk, `misses` experts that a step reads, `streamed` experts that a prompt reads.
    """

    const: float = 0.0
    weights: float = 0.0
    kv: float = 0.0
    hosted: float = 0.0
    disk: float = 0.0
    misses: float = 0.0
    streamed: float = 0.0

    def __add__(self, other: LinearCost) -> LinearCost:
        """Add term by term."""
        return LinearCost(*(a + b for a, b in zip(self.terms, other.terms, strict=True)))

    def __mul__(self, factor: float) -> LinearCost:
        """Multiply all terms."""
        return LinearCost(*(term * factor for term in self.terms))

    @property
    def terms(self) -> tuple[float, ...]:
        """All coefficients, the constant first."""
        return (self.const, self.weights, self.kv, self.hosted, self.disk, self.misses, self.streamed)

    def at(
        self,
        weights: float = 0.0,
        kv: float = 0.0,
        hosted: float = 0.0,
        disk: float = 0.0,
        misses: float = 0.0,
        streamed: float = 0.0,
    ) -> float:
        """Return the value for the shares of all terms but the constant."""
        on_device = self.weights * weights + self.kv * kv + self.hosted * hosted
        return self.const + on_device + self.disk * disk + self.misses * misses + self.streamed * streamed


@dataclass(frozen=True, slots=True)
class IntegerPolicy:
    """The whole numbers and places of a policy."""

    micro_batch: int  # mu
    num_micro_batches: int  # N / mu
    attention_on_device: bool  # A_g
    keeps_kv: bool = False  # all keys and values on the device: r_c = 1
    shares_experts: bool = False  # the host computes some of the experts: F_g < 1
    prompts: int = 1  # of a micro-batch, in a pass over prompts on a device
    chunk_tokens: int = 512  # of a pass over prompts on a device
    is_resident: bool = False  # all on the device: a pass is the model's plain forward

    @property
    def batch_size(self) -> int:
        """Sequences of a decoding step: N."""
        return self.micro_batch * self.num_micro_batches

    @classmethod
    def of(cls, policy: Policy) -> IntegerPolicy:
        """Return those of a policy."""
        return cls(
            policy.micro_batch,
            policy.num_micro_batches,
            policy.attention_on_device,
            policy.kv_on_device == 1,
            policy.experts_on_host > 0,
            policy.prompts,
            policy.chunk_tokens,
            policy.is_resident,
        )

    @property
    def window_requests(self) -> int:
        """Requests over whose keys and values the device attends at once, where the host has them."""
        return max(self.micro_batch if self.attention_on_device else 1, self.prompts)

    @property
    def pass_tokens(self) -> int:
        """The most tokens of a pass: `max_num_batched_tokens` of the configuration."""
        return max(self.chunk_tokens, self.batch_size)


Resources = Mapping[str, LinearCost]  # seconds of each in a step, or bytes of each tier


class _Times(msgspec.Struct, frozen=True):
    """The seconds of each resource for a choice."""

    decode: Resources
    prefill: Resources


class _Moved(msgspec.Struct, frozen=True):
    """The seconds of a decoding step's transfers."""

    weights: LinearCost
    up: LinearCost  # of everything else, to the device
    down: LinearCost


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted time and memory of a policy."""

    decode_s: float  # one step of the whole batch
    prefill_s: float  # of the whole batch
    first_token_s: float  # of a request on an idle engine
    tokens_per_s: float  # generated, over prefill and decode
    busy: Mapping[str, float]  # seconds that each resource works in a decoding step
    prefill_busy: Mapping[str, float]  # likewise in the prefill of the whole batch
    memory: Mapping[str, float]  # bytes in each tier


def overlaps(machine: Machine) -> tuple[float, float]:
    """Return `overlap` and `prefill_overlap` of a cost model where the engine runs on a machine.

    A host's step waits for what its own routers chose, while a prefill, which needs nearly all experts, reads ahead.
    """
    if machine.has(DEVICE):
        return 1.0, 1.0
    return 0.0, processor_of(machine.level(RAM)).read_overlap


@dataclass(frozen=True)
class CostModel:
    """The costs of one model and workload on one machine."""

    machine: Machine
    costs: ModelCosts
    workload: Workload
    num_devices: int = 1
    routing: RoutingProfile = EVEN_ROUTING
    overlap: float = 1.0  # of resources that could work at once: 1: the slowest alone counts; 0: one after another
    prefill_overlap: float = 1.0  # likewise, in prefill
    process_bytes: int = PROCESS_BYTES
    sampled_bytes: float = 0.0  # of a host's memory that sampling takes for each sequence
    min_experts: float = 0.0  # share of experts that must have a place in memory
    chunk_tokens: int = 512  # of prompts in one pass, on a host without a device
    keeps_prompts: bool = True  # hidden states of all prompts on the device, and a window for keys and values
    sharing: Sharing = ALONE  # of such a host by processes; predictions are for one engine, while all others work

    @cached_property
    def has_device(self) -> bool:
        """Return whether there is a device; otherwise the host computes everything."""
        return self.machine.has(DEVICE)

    def decode(self, choice: IntegerPolicy) -> Resources:
        """Return the seconds of each resource in one step of the whole batch."""
        if not self.has_device:
            attention = self.costs.decode_attention(*self._decoding(choice.batch_size))
            distinct = self.routing.decode_distinct(choice.batch_size)
            return {
                HOST_COMPUTE: LinearCost(self._host_pass_s(choice.batch_size, attention, distinct)),
                DISK_OFFLOAD: LinearCost(misses=self.reads(choice)[0].waits.all_on_disk_s),
            }
        step = replace(choice, prompts=1, chunk_tokens=0)
        if step not in self._known_steps:
            self._known_steps[step] = self._device_step(step)
        return self._known_steps[step]

    @cached_property
    def _known_steps(self) -> dict[IntegerPolicy, Resources]:
        return {}  # by choice without prompts: a search asks with many kinds of passes over prompts

    def _device_step(self, choice: IntegerPolicy) -> Resources:
        costs, mu, number = self.costs, choice.micro_batch, choice.num_micro_batches
        attention = costs.decode_attention(*self._decoding(mu))
        head_s = self._device_s([(1, costs.head(mu))])
        whole_s = self._device_s(costs.pass_works(mu, attention if choice.attention_on_device else None, mu))
        device, host = LinearCost(whole_s - head_s), LinearCost()
        if not choice.attention_on_device:
            host = LinearCost(self._host_s([(costs.shape.num_layers, attention)]))
        if choice.shares_experts:
            device += LinearCost(hosted=-self._device_s([(costs.num_moe_layers, costs.experts(mu))]))
            host += LinearCost(hosted=self.host_experts_s(mu))
        moved = self._decode_transfers(choice)
        others = {HOST_COMPUTE: host * number, TO_DEVICE: moved.weights + moved.up, FROM_DEVICE: moved.down}
        heads = LinearCost(head_s * number)
        chains = _chains(choice, device, host, moved)
        if choice.attention_on_device and not choice.keeps_kv:
            late = self._gathered_late(choice) * min((number - 1) / (_WINDOWS + 1), 1.0)
            chains |= {name: it + late for name, it in chains.items()} | {"gathered": moved.weights + moved.up + late}
        # The head begins after the last layer, whatever that waits for.
        bounds = {_BOUND + name: it + heads for name, it in (others | chains).items()}
        return {DEVICE_COMPUTE: device * number + heads} | others | bounds

    def _gathered_late(self, choice: IntegerPolicy) -> LinearCost:
        """Return the seconds that the link waits for keys and values, which a layer's weights keep from pinned memory.

        One micro-batch's are on their way meanwhile.
        """
        if not self.machine.has(PINNED):
            return LinearCost()
        pinned_s = self.machine.link(RAM, PINNED).seconds(self.costs.layers_bytes, self._layer_bytes)
        window = choice.micro_batch * self.workload.mean_context * self.costs.kv_layer_bytes
        sent_s = self.costs.shape.num_layers * window * self._link_s(self.machine.link(RAM, DEVICE), window)
        return LinearCost(pinned_s - sent_s, weights=-pinned_s, kv=sent_s)

    def prefill(self, choice: IntegerPolicy) -> Resources:
        """Return the seconds of each resource for the prompts of the whole batch. A device attends to all of them."""
        if not self.has_device:
            return self._host_prefill(choice)
        costs, tokens = self.costs, self.prompt_tokens(choice)
        num_passes = self.num_prompt_passes(choice)
        times = self.num_prompt_micro_batches(choice) * num_passes
        device = LinearCost(self._prompts_device_s(tokens, choice.prompts) * times)
        weights = LinearCost(costs.layers_bytes, weights=-costs.layers_bytes)
        if choice.shares_experts:
            weights += LinearCost(hosted=-costs.experts_bytes)
        weights = weights * (num_passes * self._link_s(self.weight_link, self._layer_bytes))
        all_kv = choice.batch_size * self.workload.prompt_len * costs.kv_bytes
        kv = LinearCost(all_kv, kv=-all_kv if choice.attention_on_device else 0.0)
        from_device = kv * self._link_s(self.machine.link(DEVICE, RAM), tokens * costs.kv_layer_bytes)
        resources = {DEVICE_COMPUTE: device, TO_DEVICE: weights, FROM_DEVICE: from_device}
        if not choice.shares_experts:
            return resources
        # The device waits for the host's sums, and is not charged less: it is the host that takes long.
        host = LinearCost(hosted=self.host_experts_s(tokens) * times)
        return resources | {HOST_COMPUTE: host, f"{_BOUND}device": device + host, f"{_BOUND}link": weights + host}

    def host_experts_s(self, num_tokens: float) -> float:
        """Return the host's seconds for all experts that so many tokens use."""
        return self._host_s([(self.costs.num_moe_layers, self.costs.experts(num_tokens))])

    def balanced_tokens(self, prompts: int) -> float:
        """Return the tokens of a pass over prompts that a device computes while all layers' weights arrive."""
        tokens = prompts * self.workload.prompt_len
        streamed_s = self.costs.layers_bytes * self._link_s(self.weight_link, self._layer_bytes)
        return streamed_s / self._prompts_device_s(tokens, prompts) * tokens

    @cached_property
    def enough_prompts(self) -> int:
        """Prompts of a micro-batch from which on more of them take memory, and hardly less of a device's time."""
        number, length = 1, self.workload.prompt_len
        while self._prompts_device_s(2 * number * length, 2 * number) < _FASTER * 2 * self._prompts_device_s(
            number * length, number
        ):
            number *= 2
        return number

    @property
    def _layer_bytes(self) -> float:
        return self.costs.layers_bytes / self.costs.shape.num_layers

    def _prompts_device_s(self, num_tokens: float, prompts: int) -> float:
        if (num_tokens, prompts) not in self._known_prompts:
            works = self.costs.pass_works(num_tokens, self.prompt_attention(num_tokens), prompts)
            self._known_prompts[num_tokens, prompts] = self._device_s(works)
        return self._known_prompts[num_tokens, prompts]

    @cached_property
    def _known_prompts(self) -> dict[tuple[float, int], float]:
        return {}  # by tokens and prompts of a micro-batch

    def prompt_tokens(self, choice: IntegerPolicy) -> float:
        """Return the tokens of a micro-batch of prompts on a device."""
        length, most = self.workload.prompt_len, choice.pass_tokens
        if length > most:
            return length / ceil(length / most)
        return length * min(
            choice.batch_size, most // length if choice.is_resident else min(choice.prompts, most // length)
        )

    def prompt_attention(self, num_tokens: float) -> KernelWork:
        """Return one layer's attention of such a micro-batch."""
        length = self.workload.prompt_len
        if length <= num_tokens:
            return self.costs.prefill_attention(num_tokens / length, length)
        whole, share = self.costs.prefill_attention(1, length, num_tokens), num_tokens / length
        return replace(whole, num_bytes=whole.num_bytes * share, num_flops=whole.num_flops * share)

    def num_prompt_micro_batches(self, choice: IntegerPolicy) -> int:
        """Return the micro-batches of a pass over prompts on a device."""
        num_tokens = choice.batch_size * self.workload.prompt_len
        return ceil(num_tokens / self.prompt_tokens(choice) / self.num_prompt_passes(choice))

    def num_prompt_passes(self, choice: IntegerPolicy) -> int:
        """Return the passes over the prompts of the whole batch.

        On a device, sequences whose prompts are done decode in the same passes: each takes a token's place.
        """
        length, most = self.workload.prompt_len, choice.pass_tokens
        if not self.has_device:
            return ceil(choice.batch_size * length / self.chunk_tokens)
        return mixed_passes(choice.batch_size, length, self.workload.gen_len, most)

    def memory(self, choice: IntegerPolicy) -> Resources:
        """Return the bytes of each tier at the peak; on several devices, of each."""
        costs = self.costs
        all_kv = choice.batch_size * self._blocks_tokens * costs.kv_bytes
        if not self.has_device:
            beside = self.sharing.num_here * self.process_bytes + choice.batch_size * self.sampled_bytes
            weight_bytes, kv_copies = self._held
            ram = LinearCost(beside + (weight_bytes + all_kv * kv_copies), disk=-costs.experts_bytes)
            return {RAM: ram, DISK: LinearCost(disk=costs.experts_bytes)}
        streamed = LinearCost(costs.layers_bytes, weights=-costs.layers_bytes)
        buffers = streamed * (2 * self.largest_network_bytes / costs.movable_bytes)
        # A layer without experts has one network: it stays as soon as one expert of each other layer does.
        dense_bytes = costs.movable_bytes - costs.experts_bytes if costs.experts_bytes else 0.0
        device = LinearCost(costs.model_bytes + dense_bytes) + streamed * -1.0 + buffers
        # The host keeps copies of experts that stay on the device.
        ram = LinearCost(self.process_bytes) + buffers
        if not choice.is_resident:
            ram += LinearCost(costs.movable_bytes)
        if choice.attention_on_device:
            device += LinearCost(kv=all_kv)
            ram += LinearCost(all_kv, kv=-all_kv)
        else:
            ram += LinearCost(all_kv)
        if not choice.keeps_kv and (self.keeps_prompts or choice.attention_on_device):
            # A micro-batch's keys and values while the next one's arrive, and their copies.
            windows = LinearCost(2 * choice.window_requests * self._blocks_tokens * costs.most_kv_layer_bytes)
            device, ram = device + windows, ram + windows
        return {RAM: ram, DEVICE: device * (1 / self.num_devices) + LinearCost(self._device_work_bytes(choice))}

    def _device_work_bytes(self, choice: IntegerPolicy) -> float:
        """Return what a device needs beside weights, keys and values."""
        length = self.workload.max_tokens if self.keeps_prompts else self.workload.max_prompt_len
        of_prompts = choice.pass_tokens if choice.is_resident else choice.prompts * length
        largest = min(max(of_prompts, choice.micro_batch), choice.pass_tokens)
        num_tokens = choice.pass_tokens if self.keeps_prompts else 0
        graphs = gpu_work_space.graph_bytes(self.costs, choice.batch_size) if choice.is_resident else 0
        return DEVICE_RESERVE_BYTES + graphs + self.costs.pass_activation_bytes(num_tokens, largest)

    def least_memory(self, choice: IntegerPolicy, memory: Resources) -> dict[str, float]:
        """Return the bytes of each tier for the shares that are best for it; `memory` is that of the choice."""
        weights, kv = (self.resident_share(0), 1.0), (float(choice.keeps_kv), 1.0)
        return {
            tier: linear.const
            + min(linear.weights * share for share in weights)
            + min(linear.kv * share for share in kv)
            + min(linear.disk, 0.0)
            for tier, linear in memory.items()
        }

    @cached_property
    def _blocks_tokens(self) -> int:
        """The tokens of the KV blocks of a request."""
        return ceil(self.workload.max_tokens / BLOCK_TOKENS) * BLOCK_TOKENS

    @cached_property
    def largest_network_bytes(self) -> float:
        """The experts of a layer, or a dense layer's network if that is larger."""
        costs = self.costs
        dense = costs.dense_values * costs.formats.weight_bytes if costs.num_dense_layers else 0.0
        return max(costs.shape.routing.num_experts * costs.expert_bytes, dense)

    def resident_share(self, num_experts: int) -> float:
        """Return r_w where so many experts of each layer, and all weights outside of experts, stay on the device."""
        costs = self.costs
        streamed = costs.movable_bytes * (1 - num_experts / self.num_experts)
        return 1.0 - streamed / costs.layers_bytes

    @cached_property
    def num_experts(self) -> int:
        """The parts of a layer that may stay on a device: its experts, or a dense layer's network."""
        return max(self.costs.shape.routing.num_experts, 1)

    @cached_property
    def _held(self) -> tuple[float, float]:
        """An engine's bytes of weights, and its copies of a token's keys and values."""
        return self.sharing.weight_bytes(self.costs), self.sharing.kv_copies(self.costs)

    @staticmethod
    def combine(seconds: Mapping[str, float], overlap: float) -> float:
        """Return the time of resources that work so long (equation 12), and of tasks that wait for each other."""
        total = sum(each for name, each in seconds.items() if not is_bound(name))
        return overlap * max(seconds.values()) + (1 - overlap) * total

    def predict(self, policy: Policy) -> Prediction:
        """Return the prediction for a policy."""
        assert self.has_device or not policy.ffn_on_device, "feed-forward networks run on the host, if it is alone"
        choice = IntegerPolicy.of(policy)
        shares = self._shares(policy, choice)
        times = self._times(choice)
        decode, busy = self._step(times.decode, shares, self.overlap)
        prefill, prefill_busy = self._step(times.prefill, shares, self.prefill_overlap)
        alone = IntegerPolicy.of(replace(policy, batch_size=1, micro_batch=1))
        first, _ = self._step(self._times(alone).prefill, self._shares(policy, alone), self.prefill_overlap)
        gen_len = self.workload.gen_len
        seconds = prefill + (gen_len - 1) * decode  # the prefill brings the first token
        return Prediction(
            decode_s=decode,
            prefill_s=prefill,
            first_token_s=first,
            tokens_per_s=policy.batch_size * gen_len / seconds,
            busy=busy,
            prefill_busy=prefill_busy,
            memory={tier: used.at(*shares) for tier, used in self.memory(choice).items()},
        )

    def memory_of(self, policy: Policy) -> dict[str, float]:
        """Return the bytes that a policy takes of each tier at the peak."""
        choice = IntegerPolicy.of(policy)
        shares = self._shares(policy, choice)
        return {tier: used.at(*shares) for tier, used in self.memory(choice).items()}

    def _times(self, choice: IntegerPolicy) -> _Times:
        if choice not in self._known_times:
            self._known_times[choice] = _Times(self.decode(choice), self.prefill(choice))
        return self._known_times[choice]

    @cached_property
    def _known_times(self) -> dict[IntegerPolicy, _Times]:
        return {}  # by choice: every prediction includes one sequence alone

    @cached_property
    def weight_link(self) -> Link:
        """The link of weights to the device."""
        return self.machine.link(PINNED if self.machine.has(PINNED) else RAM, DEVICE)

    def reads(self, choice: IntegerPolicy) -> tuple[ExpertReads, ExpertReads]:
        """Return the reads of experts of a step and of a pass over prompts, on a host that computes all."""
        if choice not in self._reads:
            self._reads[choice] = self._make_reads(choice)
        return self._reads[choice]

    @cached_property
    def _reads(self) -> dict[IntegerPolicy, tuple[ExpertReads, ExpertReads]]:
        return {}  # by choice: a search asks for the same one many times

    def _make_reads(self, choice: IntegerPolicy) -> tuple[ExpertReads, ExpertReads]:
        routing, tokens = self.routing, self._prompt_pass(choice)
        step = self._expert_reads(choice.batch_size, routing.decode_distinct, routing.decode_misses)
        prompts = self._expert_reads(tokens, routing.prefill_distinct, routing.prefill_misses)
        return step, replace(prompts, stop_s=0.0)

    def num_read(self, policy: Policy) -> tuple[float, float]:
        """Return the experts that a host reads for a step, and for the prefill of the whole batch."""
        choice = IntegerPolicy.of(policy)
        step, prompts = (reads.num_read(policy.experts_on_disk) for reads in self.reads(choice))
        return step, prompts * self.num_prompt_passes(choice)

    def read_s(self, policy: Policy) -> tuple[float, float]:
        """Return the seconds of these reads."""
        choice = IntegerPolicy.of(policy)
        step, prompts = (reads.read_s(reads.num_read(policy.experts_on_disk)) for reads in self.reads(choice))
        return step, prompts * self.num_prompt_passes(choice)

    @property
    def read_expert_bytes(self) -> float:
        """The bytes of an expert that comes from disk."""
        return self.costs.expert_bytes

    def _expert_reads(
        self, num_tokens: float, distinct: Callable[[float], float], misses: Callable[[float], HitCurve]
    ) -> ExpertReads:
        costs = self.costs
        even = expected_distinct(costs.shape.routing.num_experts, costs.shape.routing.top_k, num_tokens)
        processor = processor_of(self.machine.level(RAM))
        link = self.machine.link(DISK, RAM) if self.machine.has(DISK) else None
        return ExpertReads(
            num_layers=costs.num_moe_layers,
            distinct=even * distinct(num_tokens),
            even=even,
            misses=misses(num_tokens),
            rates=DiskRates(link=link, expert_bytes=self.read_expert_bytes),
            stop_s=processor.stop_s,
            load_s=processor.load_s,
        )

    def _prompt_pass(self, choice: IntegerPolicy) -> float:
        """Return the prompt tokens of a pass."""
        return choice.batch_size * self.workload.prompt_len / self.num_prompt_passes(choice)

    def _step(self, resources: Resources, shares: Sequence[float], overlap: float) -> tuple[float, dict[str, float]]:
        seconds = {name: max(linear.at(*shares), 0.0) for name, linear in resources.items()}
        return self.combine(seconds, overlap), {name: each for name, each in seconds.items() if not is_bound(name)}

    def _shares(self, policy: Policy, choice: IntegerPolicy) -> tuple[float, ...]:
        on_disk = policy.experts_on_disk
        places = (policy.weights_on_device, policy.kv_on_device, policy.experts_on_host, on_disk)
        if self.has_device:
            return places
        return (*places, *(reads.waits.curve.misses(on_disk) for reads in self.reads(choice)))

    def _decoding(self, num_sequences: int) -> tuple[int, float]:
        return num_sequences, self.workload.mean_context

    def _decode_transfers(self, choice: IntegerPolicy) -> _Moved:
        costs, batch = self.costs, choice.batch_size
        shape, size = costs.shape, costs.formats.activation_bytes
        page = self._layer_bytes / choice.num_micro_batches
        weights = LinearCost(costs.layers_bytes, weights=-costs.layers_bytes)
        if choice.shares_experts:
            weights += LinearCost(hosted=-costs.experts_bytes)
        small, back = self.machine.link(RAM, DEVICE), self.machine.link(DEVICE, RAM)
        one = choice.micro_batch * shape.hidden_size * size  # bytes of a micro-batch's hidden states
        up = down = 0.0  # bytes of activations in all layers
        per_layer = batch * shape.num_layers * size
        if choice.attention_on_device:
            context = batch * self.workload.mean_context * costs.kv_bytes
            window = choice.micro_batch * self.workload.mean_context * costs.kv_layer_bytes
            to_device = LinearCost(context, kv=-context) * self._link_s(small, window)
            new = batch * costs.kv_bytes
            from_device = LinearCost(new, kv=-new) * self._link_s(back, choice.micro_batch * costs.kv_layer_bytes)
        else:
            up += per_layer * shape.attended_size
            down += per_layer * costs.projected_size
            to_device = from_device = LinearCost()
        if choice.shares_experts:
            per_moe = batch * costs.num_moe_layers
            up += per_moe * costs.summed_bytes
            down += per_moe * costs.routed_bytes
        summed = 2 * per_layer * shape.hidden_size * (1 - 1 / self.num_devices)  # two all-reduces a layer
        return _Moved(
            weights * self._link_s(self.weight_link, page),
            to_device + LinearCost((up + summed) * self._link_s(small, one)),
            from_device + LinearCost((down + summed) * self._link_s(back, one)),
        )

    def _host_pass_s(
        self, num_tokens: float, attention: KernelWork, distinct: float, num_sampled: float | None = None
    ) -> float:
        """Return the seconds of a pass of a host that computes everything sequentially.

        It uses a share of the experts that even routers would: `distinct`.
        """
        costs = self.costs
        sampled = num_tokens if num_sampled is None else num_sampled
        processor = processor_of(self.machine.level(RAM))
        beside_s = processor.pass_s + sampled * processor.token_s
        if (ranked := self.ranked_layers) is not None:
            sampling_s = self._host_s([(1, costs.sampling(sampled))])
            return ranked.seconds(num_tokens, attention, distinct) + ranked.head_s(sampled) + sampling_s + beside_s
        used = distinct * expected_distinct(costs.shape.routing.num_experts, costs.shape.routing.top_k, num_tokens)
        works = costs.pass_works(num_tokens, attention, sampled, used) + costs.host_works(num_tokens, sampled)
        return self._host_s(works) + beside_s

    @cached_property
    def ranked_layers(self) -> RankedLayers | None:
        """The layers, where several ranks share them."""
        parallel = self.sharing.parallel
        return None if parallel is None else RankedLayers(self.machine, self._host_level, self.costs, parallel)

    @cached_property
    def _host_level(self) -> MemoryLevel:
        """A process's part of the host's memory."""
        return self.sharing.level(self.machine.level(RAM))

    def _host_prefill(self, choice: IntegerPolicy) -> dict[str, LinearCost]:
        """Return the chunks of all prompts."""
        num_prompts, tokens = choice.batch_size, self._prompt_pass(choice)
        passes = self.num_prompt_passes(choice)
        whole = self.costs.prefill_attention(num_prompts, self.workload.prompt_len, self.chunk_tokens)
        part = KernelWork(
            whole.kernel, whole.dtype, whole.num_bytes / passes, whole.num_flops / passes, whole.rows, whole.values
        )
        compute_s = self._host_pass_s(tokens, part, self.routing.prefill_distinct(tokens), num_prompts / passes)
        return {
            HOST_COMPUTE: LinearCost(compute_s * passes),
            DISK_OFFLOAD: LinearCost(streamed=self.reads(choice)[1].waits.all_on_disk_s * passes),
        }

    def _device_s(self, works: Iterable[tuple[int, KernelWork]]) -> float:
        level = self.machine.level(DEVICE)
        return sum(count * work_seconds(level, work, self.num_devices) for count, work in works)

    def _host_s(self, works: Iterable[tuple[int, KernelWork]]) -> float:
        return sum(count * work_seconds(self._host_level, work) for count, work in works)

    def _link_s(self, link: Link, transfer_bytes: float) -> float:
        """Return the seconds of a byte over the links of all devices."""
        width = 1 if link.is_shared else self.num_devices
        return 1.0 / (link.bytes_per_s(transfer_bytes / width) * width)


def _chains(choice: IntegerPolicy, device: LinearCost, host: LinearCost, moved: _Moved) -> dict[str, LinearCost]:
    """Return the seconds of tasks that wait for each other; `device` and `host` are those of a micro-batch."""
    number = choice.num_micro_batches
    if choice.keeps_kv:
        return {}
    if choice.attention_on_device:
        # Two micro-batches have their keys and values; the others' are behind the weights of the next layer.
        return {"keys and values": moved.weights + device * max(number - _WINDOWS, 0)}
    page, activations = moved.weights * (1 / number), (moved.up + moved.down) * (1 / number)
    one = device + activations
    if not choice.shares_experts:
        # The next layer's first projection needs its first page, which follows this layer's hidden states.
        return {"micro-batch": one + host, "page": page + host + activations}
    # The device begins with its experts after all micro-batches have been at the host, and the host attends again
    # after the first of them. The first micro-batch's way to the device is behind a page of the next layer.
    hosted = LinearCost(hosted=host.hosted)
    return {"micro-batch": one + host * number, "page": one + hosted * number + page}


def is_bound(name: str) -> bool:
    """Return whether seconds of this name are a bound, and no resource's."""
    return name.startswith(_BOUND)


def mixed_passes(num_prompts: int, length: int, gen_len: int, most_tokens: int) -> int:
    """Return the passes until all prompts are done, if finished sequences decode in the same passes.

    Each of d decoding sequences takes the place of a prompt token. So d grows by (most - d) / length a pass, which is
    an exponential. After the first answers end, prompts begin as fast as answers do.
    """
    if num_prompts * length <= most_tokens:
        return 1
    growing = min(num_prompts, -most_tokens * expm1(-gen_len / length))
    passes = -length * log1p(-growing / most_tokens)
    passes += (num_prompts - growing) * (length + gen_len) / most_tokens
    return ceil(max(passes, num_prompts * length / most_tokens))
