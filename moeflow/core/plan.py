"""What was decided before anything runs: the policy, what it is expected to bring, and why. Frozen; JSON in and out.

Symbols of MoE-Lightning (table 1) stand in the comments. Knows neither how a policy is found nor how it is carried out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final

from moeflow.core.arrival_rate import check_rate
from moeflow.core.hardware import DTYPES
from moeflow.core.json_fields import Fields, read_json

GOALS: Final = ("throughput", "latency", "memory")
RESIDENT: Final = "resident"  # everything resident: a pass is the model's plain forward
DISK_OFFLOAD: Final = "disk-offload"  # experts come from disk as a pass needs them
FORMAT_VERSION: Final = 1  # of the JSON; to be raised when a field means something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the model: averages, in tokens."""

    prompt_len: int  # s
    gen_len: int  # n
    max_prompt_len: int  # what room and padding are computed with
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

    batch_size: int  # N: sequences that decode together
    micro_batch: int  # mu: of these, computed at once
    attention_on_device: bool  # A_g
    ffn_on_device: bool  # F_g: wherever there is a device
    weights_on_device: float = 0.0  # r_w: share of the layers' weights that stay there
    kv_on_device: float = 0.0  # r_c: share of keys and values
    experts_on_disk: float = 0.0  # share of experts without a place in memory
    chunk_tokens: int = 512  # of a prompt in one pass, on a host without a device
    num_devices: int = 1  # that hold a part of every layer each (tensor parallelism)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pass."""
        return -(-self.batch_size // self.micro_batch)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A prediction, and the interval in which it is expected to come true."""

    value: float
    low: float
    high: float

    @classmethod
    def within(cls, value: float, uncertainty: float) -> Estimate:
        """Return a value that may be off by a factor of 1 + `uncertainty` either way."""
        return cls(value, value / (1 + uncertainty), value * (1 + uncertainty))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """What a plan takes of one kind of memory at its peak."""

    tier: str  # a level's name
    peak_bytes: Estimate
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What a change would bring, everything planned anew."""

    change: str
    speedup: float  # of what the goal asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decision for one model, machine, workload and goal."""

    model: str
    machine: str
    goal: str  # one of GOALS
    workload: Workload
    weight_format: str
    embedding_format: str
    kv_dtype: str
    policy: Policy
    pipeline: str
    kv_cache_bytes: int
    memory_bytes: int  # that RAM was limited to; 0: what there is
    prefill_tokens_per_s: Estimate
    decode_tokens_per_s: Estimate
    tokens_per_s: Estimate  # generated, over prefill and decode
    time_to_first_token_s: Estimate  # of a request that finds nobody else; all at once wait for `all_prompts_s`
    time_per_token_s: Estimate  # between two tokens of a request, with the whole batch
    memory: tuple[TierUse, ...]
    bottleneck: str
    busy: tuple[tuple[str, float], ...]  # (resource, share of a decoding step's time)
    helps: tuple[Sensitivity, ...] = ()  # best first
    reasons: tuple[tuple[str, str], ...] = ()  # (field, why it was decided so)
    machine_identity: str = ""  # of the machine that was measured for it; empty: from data sheets
    num_threads: int = 0  # that compute on a host; 0: as many as the machine has cores
    expert_places: tuple[tuple[str, float], ...] = ()  # (tier, share of experts that live there), together 1

    @property
    def all_prompts_s(self) -> Estimate:
        """The prefill of the whole batch: what the last of N requests that come together waits for its first token."""
        num_tokens, rate = self.policy.batch_size * self.workload.prompt_len, self.prefill_tokens_per_s
        return Estimate(num_tokens / rate.value, num_tokens / rate.high, num_tokens / rate.low)


def plan_to_json(plan: Plan) -> str:
    """Return a plan as indented JSON, which `plan_from_json` reads back as an equal one."""
    names = ("busy", "reasons", "expert_places")
    pairs = {name: dict(getattr(plan, name)) for name in names}
    raw = {"format_version": FORMAT_VERSION} | asdict(plan) | pairs
    return json.dumps(raw, indent=1, allow_nan=False) + "\n"


def plan_from_json(text: str | bytes, name: str) -> Plan:
    """Read a plan; `name` is the file's, for messages.

    Raises: ConfigError if it is no JSON, a field is missing, unknown, of the wrong kind or out of range.
    """
    return read_json(text, f"plan {name}", _plan)


def _plan(fields: Fields) -> Plan:
    version = fields.count("format_version")
    if version != FORMAT_VERSION:
        cause = f"is {version}, but this moeflow reads plans of version {FORMAT_VERSION}"
        raise fields.error("format_version", cause, "make the plan anew with `moeflow plan --json`")
    return Plan(
        model=fields.text("model"),
        machine=fields.text("machine"),
        goal=fields.one_of("goal", GOALS),
        workload=fields.item("workload", _workload),
        weight_format=fields.one_of("weight_format", DTYPES),
        embedding_format=fields.one_of("embedding_format", DTYPES),
        kv_dtype=fields.one_of("kv_dtype", DTYPES),
        policy=fields.item("policy", _policy),
        pipeline=fields.text("pipeline"),
        kv_cache_bytes=fields.count("kv_cache_bytes", least=0),
        memory_bytes=fields.count("memory_bytes", least=0),
        prefill_tokens_per_s=fields.item("prefill_tokens_per_s", _estimate),
        decode_tokens_per_s=fields.item("decode_tokens_per_s", _estimate),
        tokens_per_s=fields.item("tokens_per_s", _estimate),
        time_to_first_token_s=fields.item("time_to_first_token_s", _estimate),
        time_per_token_s=fields.item("time_per_token_s", _estimate),
        memory=fields.items("memory", _tier),
        bottleneck=fields.text("bottleneck"),
        busy=_numbers(fields, "busy"),
        helps=fields.items("helps", _help, least=0),
        reasons=tuple((key, str(value)) for key, value in fields.mapping("reasons", default={}).items()),
        machine_identity=fields.text("machine_identity", default=""),
        num_threads=fields.count("num_threads", default=0, least=0),
        expert_places=_numbers(fields, "expert_places", default={}),
    )


def _workload(fields: Fields) -> Workload:
    return Workload(
        prompt_len=fields.count("prompt_len"),
        gen_len=fields.count("gen_len"),
        max_prompt_len=fields.count("max_prompt_len"),
        rate=fields.number("rate", default=0.0, least=0.0),
    )


def _policy(fields: Fields) -> Policy:
    return Policy(
        batch_size=fields.count("batch_size"),
        micro_batch=fields.count("micro_batch"),
        attention_on_device=fields.flag("attention_on_device", default=False),
        ffn_on_device=fields.flag("ffn_on_device", default=False),
        weights_on_device=fields.number("weights_on_device", least=0.0),
        kv_on_device=fields.number("kv_on_device", least=0.0),
        experts_on_disk=fields.number("experts_on_disk", least=0.0),
        chunk_tokens=fields.count("chunk_tokens"),
        num_devices=fields.count("num_devices"),
    )


def _estimate(fields: Fields) -> Estimate:
    return Estimate(
        fields.number("value", least=0.0), fields.number("low", least=0.0), fields.number("high", least=0.0)
    )


def _tier(fields: Fields) -> TierUse:
    return TierUse(
        tier=fields.text("tier"),
        peak_bytes=fields.item("peak_bytes", _estimate),
        capacity_bytes=fields.count("capacity_bytes"),
    )


def _help(fields: Fields) -> Sensitivity:
    return Sensitivity(change=fields.text("change"), speedup=fields.number("speedup"))


def _numbers(fields: Fields, key: str, default: Mapping[str, float] | None = None) -> tuple[tuple[str, float], ...]:
    raw = fields.mapping(key, default)
    inner = Fields(raw, fields.file, key)
    return tuple((name, inner.number(name, least=0.0)) for name in raw)
