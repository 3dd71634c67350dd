"""The answer of `GET /stats/speed`. What is not known is null, with the reason in `unknown`; nothing stands for it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Figure = Literal["alone_tokens_per_s", "full_tokens_per_s", "first_token_s", "memory_bytes"]


class Roofs(BaseModel):
    """The machine's limits as it was measured, of the memory that passes read and the processor that computes."""

    level: str | None  # "ram" or "device"
    processor: str | None
    num_devices: int  # whose rates these are, added up; 0: the processor's
    memory_bytes_per_s: float | None
    disk_bytes_per_s: float | None
    flops_per_s: dict[str, float]  # by format; empty: unknown
    weights_roof: str | None  # the format of these that bounds the model's matrices
    source: str  # of these figures
    measured_at: str  # ISO date and time; empty: unknown
    age_s: float | None
    uncertainty: float | None  # relative
    is_disturbed: bool  # other work ran beside the measurement, so that its figures may be too low
    unknown: str  # empty: all but the disk is known


class ModelCost(BaseModel):
    """What one token takes, and what the model holds; from its shape and its formats."""

    name: str
    weight_format: str
    active_bytes_per_token: float  # of weights that a token reads if it is alone
    flops_per_token: float  # attention to earlier tokens left out
    kv_bytes_per_token: float
    resident_bytes: float  # all weights


class Point(BaseModel):
    """The mean of the newest passes of a kind, within five seconds."""

    age_s: float
    num_passes: int
    num_engines: int
    pass_s: float
    tokens_per_pass: float
    sequences_per_pass: float
    generated_per_s: float  # tokens, of all engines
    context: float  # positions that a token sees
    distinct_experts: float | None  # of a layer that a pass used, as counted; null: not counted
    expected_experts: float | None  # likewise as routers are expected to choose; null: there are no experts
    bytes_per_pass: float  # of weights, keys and values
    flops_per_pass: float
    disk_bytes_per_pass: float
    stall_s: float  # that a pass waited for experts
    waited_s: float  # that it waited for other ranks, or a GPU
    intensity: float  # FLOP per byte
    flops_per_s: float
    bytes_per_s: float
    roof_pass_s: float | None  # the least seconds that the roofs allow
    share_of_roof: float | None
    binds: Literal["memory", "compute", "disk", "exchange"] | None


class Now(BaseModel):
    """Where passes lie, by what they do."""

    decode: Point | None
    prompts: Point | None  # passes with any part of a prompt
    observed_s: float  # for so long passes have been observed
    other_programs: float | None  # share of the processor that they had since the last look; null: not known yet
    unknown: str


class TrailPoint(BaseModel):
    """The passes of one second."""

    age_s: float
    kind: Literal["decode", "prompts"]
    intensity: float
    flops_per_s: float


class Mark(BaseModel):
    """Where the plan expects decoding of so many sequences."""

    num_sequences: int
    context: float
    intensity: float
    flops_per_s: float
    tokens_per_s: float


class Planned(BaseModel):
    """A figure of the plan, and what it holds for."""

    value: float
    low: float
    high: float
    num_sequences: int
    prompt_len: int
    gen_len: int


class MeasuredFigure(BaseModel):
    """A figure of the last minute, and what it was measured with."""

    value: float
    num_sequences: int
    num_tokens: int  # of context; for the first token of the prompt, as computed; for memory with keys and values
    num_passes: int
    age_s: float


class Comparison(BaseModel):
    """The plan beside the measurement."""

    figure: Figure
    planned: Planned | None
    measured: MeasuredFigure | None
    expected: float | None  # what the plan's cost model predicts for what was measured
    error_percent: float | None  # how much more was expected than measured
    unknown: str


class Memory(BaseModel):
    """Main memory; see `memory_use.py`."""

    limit_bytes: int
    is_limit_set: bool
    used_bytes: int
    weights_bytes: int
    kv_used_bytes: int
    kv_cached_bytes: int
    other_bytes: int
    kv_free_bytes: int
    free_bytes: int
    kv_tokens_free: int
    tokens_in_free_bytes: int | None


class AdviceItem(BaseModel):
    """A change, and the speedups that the planner expects of it."""

    kind: Literal["option", "batch", "machine"]
    change: str
    option: str
    command: str
    speedup_alone: float | None
    speedup_full: float | None
    alone_tokens_per_s: float | None
    full_tokens_per_s: float | None
    memory_bytes: int | None


class AdviceList(BaseModel):
    """What would help most, best first."""

    items: list[AdviceItem] | None
    unknown: str


class SpeedResponse(BaseModel):
    """Roofs, the operating point, the plan beside the measurement, memory, and what would help."""

    model: ModelCost | None
    roofs: Roofs | None
    now: Now
    trail: list[TrailPoint]  # of the last minute, the oldest first
    marks: list[Mark]
    predicted: list[Comparison]
    memory: Memory | None
    advice: AdviceList
    unknown: str  # why the model and the roofs are not known; empty: they are
