"""The decisions before a run: the engine's configuration, its predicted speed and memory, and the reasons. Frozen;
JSON.

Symbols of MoE-Lightning (table 1) stand in the comments. Knows neither how a plan is found nor how it is carried out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

import msgspec

from moeflow.core.arrival_rate import check_rate
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import NodeReplicas
from moeflow.core.truncated_repr import truncated_repr
from moeflow.core.typed_json import convert
from moeflow.core.untrusted import UnreadableError, parse_json

GOALS: Final = ("throughput", "latency", "memory")
Goal = Literal["throughput", "latency", "memory"]
RESIDENT: Final = "resident"  # everything resident: a pass is the model's plain forward
HYBRID: Final = "hybrid"  # the device computes some experts of a layer, the host all others
DISK_OFFLOAD: Final = "disk-offload"  # experts come from disk as a pass needs them
FORMAT_VERSION: Final = 3  # of the JSON; to be raised when a field means something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The load of the model: averages, in tokens."""

    prompt_len: int  # s
    gen_len: int  # n
    max_prompt_len: int  # for memory and padding
    rate: float = 0.0  # requests a second; 0: all are there at once

    def __post_init__(self) -> None:
        """Raise ConfigError for a rate that is none."""
        if self.rate != 0:
            check_rate(self.rate, also=", or 0: all are there at once")

    @property
    def mean_context(self) -> float:
        """Tokens that a decoding step sees on average."""
        return self.prompt_len + (self.gen_len + 1) / 2

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request."""
        return self.max_prompt_len + self.gen_len


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Who takes part in a pass, and where tensors live and stages run. Without a device, host means the only place."""

    batch_size: int  # N: sequences that decode concurrently
    micro_batch: int  # mu: of these, computed at once
    attention_on_device: bool  # A_g
    ffn_on_device: bool  # F_g: false if the host computes all experts
    weights_on_device: float = 0.0  # r_w: share of the layers' weights that stay there
    kv_on_device: float = 0.0  # r_c: share of keys and values
    experts_on_host: float = 0.0  # share of experts that the host computes beside a device
    experts_on_disk: float = 0.0  # share of experts without a place in memory
    chunk_tokens: int = 512  # of prompts in one pass
    prompts: int = 1  # of a micro-batch, in a pass over prompts on a device
    num_gpu_experts: int | None = None  # of each layer, if the host computes all others; None: it computes none
    num_devices: int = 1  # that hold a part of every layer each (tensor parallelism)

    @property
    def is_resident(self) -> bool:
        """Whether a device keeps and computes everything."""
        return self.attention_on_device and self.weights_on_device == self.kv_on_device == 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pass."""
        return -(-self.batch_size // self.micro_batch)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction and its expected interval."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, uncertainty: float) -> Estimate:
        """Return a value that may be off by a factor of 1 + `uncertainty` either way."""
        return cls(value, value / (1 + uncertainty), value * (1 + uncertainty))


class TierUse(msgspec.Struct, frozen=True, kw_only=True):
    """What a plan takes of one kind of memory at its peak."""

    tier: str  # a level's name
    peak_bytes: Estimate
    capacity_bytes: int


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """What a change would bring, everything planned anew."""

    change: str
    speedup: float  # of what the goal asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The prediction for a plan's workload: total speed and memory of its engines."""

    policy: Policy  # the parts of its passes, and their places
    prefill_tokens_per_s: Estimate
    decode_tokens_per_s: Estimate
    decode_alone_tokens_per_s: Estimate  # of one request without others
    tokens_per_s: Estimate  # generated, over prefill and decode
    time_to_first_token_s: Estimate  # of a request without others; simultaneous requests wait for `all_prompts_s`
    all_prompts_s: Estimate  # the prefill of the whole batch
    time_per_token_s: Estimate  # between two tokens of a request, with the whole batch
    memory: tuple[TierUse, ...]
    busy: tuple[tuple[str, float], ...]  # (resource, share of a decoding step's time)
    bottleneck: str = ""  # empty: not asked for
    helps: tuple[Sensitivity, ...] = ()  # best first
    expert_places: tuple[tuple[str, float], ...] = ()  # (tier, share of experts there); the sum is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decision for one model, machine, workload and goal."""

    config: EngineConfig  # complete: what the engine runs with
    settings: dict[str, Any]  # that it was made from: fields of `Settings`, unless at their defaults
    num_replicas: int = 1  # engines of this configuration, which share the machine
    node_replicas: NodeReplicas | None = None  # engines on other machines; None: all are on this one
    memory_bytes: int = 0  # that its processes hold at most, on the processor; 0: not known
    goal: Goal
    workload: Workload  # that it was decided for
    machine: str  # its name
    machine_identity: str = ""  # of the machine that was measured for it; empty: from data sheets, or not measured
    forecast: Forecast | None = None  # None: nothing is known of how fast the machine is
    reasons: tuple[tuple[str, str], ...] = ()  # (decision, reason)

    @property
    def pipeline(self) -> str:
        """What runs a pass: RESIDENT, DISK_OFFLOAD, or a name of pipeline/catalog.py."""
        if self.config.offload is not None:
            return self.config.offload.pipeline
        if self.config.hybrid is not None:
            return HYBRID
        return RESIDENT if self.config.experts is None else DISK_OFFLOAD


def plan_to_json(plan: Plan) -> str:
    """Return a plan as indented JSON, which `plan_from_json` reads back as an equal one."""
    raw = msgspec.json.encode({"format_version": FORMAT_VERSION} | asdict(plan))
    return msgspec.json.format(raw, indent=1).decode() + "\n"


def plan_from_json(text: str | bytes, name: str) -> Plan:
    """Read a plan; `name` is the file's, for messages.

    Raises: ConfigError if it is no JSON, a field is missing, unknown, or of the wrong kind.
    """
    remedy = "Make the plan anew with `moeflow plan --json`"
    try:
        raw = parse_json(text)
        version = raw.pop("format_version", None) if isinstance(raw, dict) else None
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"plan {name} is of version {truncated_repr(version)}, this moeflow reads {FORMAT_VERSION}. {remedy}"
            )
        return convert(raw, Plan)
    except UnreadableError as error:
        raise ConfigError(f"plan {name} cannot be read: {error}. {remedy}") from None
