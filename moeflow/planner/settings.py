"""What the user sets before anything is decided, and what holds where many set nothing.

A field that may be set from the command line declares its option: verbs make their options of these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import ATTENTION_LAYOUTS, EXPERT_LAYOUTS, EXPERT_PLACEMENTS, RAY_PLACEMENTS
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.predict.registry import NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.kernels.weight_format import DEVICE_DTYPES, MIXES, QUANTIZED
from moeflow.parallel.placement.layouts import ADDED_LAYOUTS
from moeflow.pipeline.catalog import OFFLOADING

BLOCK_SIZE: Final = 16
MAX_THREADS: Final = 1024  # more than machines have cores
_MOST: Final = {"num_threads": MAX_THREADS, "num_ranks": MAX_THREADS, "num_replicas": MAX_THREADS}
DEFAULT_MAX_NUM_SEQS: Final = 32
OFFLOADED_MAX_NUM_SEQS: Final = 256  # where weights go to a device each pass: the more requests share that, the better
OFFLOADED_NUM_BATCHED_TOKENS: Final = 2048
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 512  # about a second on two CPU cores: as long as decodes wait for a prefill
DISK_NUM_BATCHED_TOKENS: Final = (
    2048,
    1024,
)  # where a pass reads most of the model: the first that fits

LOSSY_ROUTING: Final = {"sida": 1, "sida:3": 3}  # experts of a token, as SiDA was published with

GENERATION_CONFIGS: Final = ("auto", "none")

Kind = Literal["text", "texts", "choice", "count", "bytes", "switch", "existing file", "new file", "folder"]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """How a field is set on the command line."""

    flag: str
    help: str
    group: str
    kind: Kind
    choices: tuple[str, ...] = ()
    default: str = ""  # as help shows it, where the field's own says nothing
    is_common: bool = False  # one of the few that --help shows
    is_served_only: bool = False  # only where the engine has a process of its own


_INTERNAL: Final = {"is_internal": True}  # verbs set it, by how they run the engine; no user's choice


def _option(kind: Kind, flag: str, help: str, group: str, **more: Any) -> dict[str, Option]:
    return {"option": Option(flag=flag, help=help, group=group, kind=kind, **more)}


def options() -> dict[str, Option]:
    """Return the fields of `Settings` that the command line sets, in the order of help."""
    found = {field.name: field.metadata.get("option") for field in dataclasses.fields(Settings)}
    return {name: option for name, option in found.items() if option is not None}


def written_files() -> list[str]:
    """Return the names of the fields of `Settings` that name a file which one engine writes, of one model."""
    return [name for name, option in options().items() if option.kind == "new file"]


def given_options(settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """Return what the user gave of these fields of `Settings`: flag of the command line -> value."""
    known, defaults = options(), Settings()
    given = [name for name in names if getattr(settings, name) != getattr(defaults, name)]
    return {known[name].flag: getattr(settings, name) for name in given}


def user_settings() -> list[str]:
    """Return the names of the fields of `Settings` that users may set: all but what verbs alone decide."""
    return [field.name for field in dataclasses.fields(Settings) if not field.metadata.get("is_internal", False)]


def to_plain(settings: Settings) -> dict[str, Any]:
    """Return the fields that are not at their defaults, as JSON holds them."""
    defaults = Settings()
    fields = {field.name: getattr(settings, field.name) for field in dataclasses.fields(Settings)}
    given = {name: value for name, value in fields.items() if value != getattr(defaults, name)}
    return cast("dict[str, Any]", msgspec.json.decode(msgspec.json.encode(given, enc_hook=str)))


def from_plain(given: dict[str, Any]) -> Settings:
    """Return the settings that `to_plain` made these fields of. Raises: ConfigError for any others."""
    try:
        if unknown := set(given) - {field.name for field in dataclasses.fields(Settings)}:
            raise ConfigError(f"no setting is called {truncated_repr(min(unknown))}")
        return msgspec.convert(given, Settings, dec_hook=lambda kind, value: kind(value))
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"settings cannot be read: {truncated(str(error))}") from None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user set. None or "auto": to be decided."""

    model: str | None = None  # Hugging Face folder or GGUF file; None: the built-in model
    model_name: str | None = None
    dtype: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--dtype",
            "Weight data type; auto: the checkpoint's own, or the one that fits. float16 is for GPUs.",
            "Weights",
            choices=("auto", *DEVICE_DTYPES),
        ),
    )
    quantize: str | None = field(
        default=None,
        metadata=_option(
            "choice",
            "--quantize",
            "Quantize weights: smaller and faster, not quite the same answers. int8, int4: rounded in groups of 32. "
            "q4_k, q4_k_m: four bits of better quality, best after `moeflow pack` (see its --help).",
            "Weights",
            choices=(*QUANTIZED, *MIXES),
            is_common=True,
        ),
    )
    exact_activations: bool = field(
        default=False,
        metadata=_option(
            "switch",
            "--exact-activations/--fast-activations",
            "Activations for a file's integer weights. Exact: 16 bits, with next to no loss. Fast: 8 bits in groups "
            "of 32 (llama.cpp: of 256), which makes prefill half as fast again.",
            "Weights",
        ),
    )
    packed_weights_file: Path | None = field(
        default=None,
        metadata=_option(
            "existing file",
            "--packed-weights",
            "Packed weights that `moeflow pack` wrote: loading takes a moment; with --memory, written if missing.",
            "Weights",
            default="in the cache folder",
        ),
    )
    memory_bytes: int | None = field(
        default=None,
        metadata=_option(
            "bytes",
            "--memory",
            "Memory for everything, such as 4GiB; experts that do not fit are read from disk.",
            "Memory",
            is_common=True,
        ),
    )
    kv_cache_bytes: int | None = field(
        default=None, metadata=_option("bytes", "--kv-cache", "Memory for the KV cache, such as 2GiB.", "Memory")
    )
    kv_dtype: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--kv-dtype",
            "KV cache data type.",
            "Memory",
            choices=("auto", "float32", "bfloat16", "int8"),
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--max-model-len",
            "Maximum context length: prompt and answer of one request, in tokens.",
            "Batching",
            default="the model's, or what fits",
            is_common=True,
        ),
    )
    max_num_seqs: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--max-num-seqs",
            "Maximum concurrent requests.",
            "Batching",
            default="planned",
            is_common=True,
        ),
    )
    max_num_batched_tokens: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--max-num-batched-tokens",
            "Maximum tokens of one pass: fewer shorten the pauses that long prompts cause.",
            "Batching",
            default="planned",
        ),
    )
    prefix_caching: bool = field(
        default=True,
        metadata=_option(
            "switch",
            "--prefix-caching/--no-prefix-caching",
            "Reuse the KV cache of shared prefixes.",
            "Batching",
        ),
    )
    prompt_cache: Path | None = field(
        default=None,
        metadata=_option(
            "folder",
            "--prompt-cache",
            "Keep the KV cache of prompts and answers in this folder, too: after a restart, conversations resume at "
            "once. Engines may share it. Users who can read it can learn the conversations.",
            "Batching",
            default="none; with --prompt-cache-size: prompts in the cache folder",
        ),
    )
    prompt_cache_bytes: int | None = field(
        default=None,
        metadata=_option(
            "bytes",
            "--prompt-cache-size",
            "Disk space for it, such as 50GiB: the least recently used prompts are deleted first.",
            "Batching",
            default="none; with --prompt-cache: 8GiB",
        ),
    )
    num_threads: int | None = field(
        default=None,
        metadata=_option(
            "count", "--threads", "CPU threads.", "Processor and device", default="all cores", is_common=True
        ),
    )
    num_ranks: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--ranks",
            "Processes that share the model, with the same answers to the bit; threads are divided.",
            "Processor and device",
            default="1",
        ),
    )
    stages: str | None = field(
        default=None,
        metadata=_option(
            "text",
            "--stages",
            "Stages that layers are cut into, each on ranks of its own: a number, or the layers of each, such as "
            "10,14. For models larger than one machine's memory, and for slow networks.",
            "Processor and device",
            default="1",
        ),
    )
    expert_placement: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--expert-placement",
            "Which rank has which experts: blocks by index, or moved while serving so that ranks get equal loads "
            "(load, and auto).",
            "Processor and device",
            choices=("auto", *EXPERT_PLACEMENTS),
        ),
    )
    num_redundant_experts: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--redundant-experts",
            "Replicas of the most used experts of each layer, over all ranks.",
            "Processor and device",
            default="none",
        ),
    )
    expert_layout: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--expert-layout",
            "Each rank's share of a layer's experts: some of them (expert), or a slice of every one (sliced). Slices "
            "keep ranks equally busy whatever routers choose. auto: the faster by forecast.",
            "Processor and device",
            choices=("auto", *EXPERT_LAYOUTS, *ADDED_LAYOUTS),
        ),
    )
    attention_layout: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--attention-layout",
            "Each rank's share of attention, dense layers and the output projection: all (replicated), or a part "
            "(tensor). A part has the keys and values of its own heads only. auto: the faster by forecast.",
            "Processor and device",
            choices=("auto", *ATTENTION_LAYOUTS),
        ),
    )
    num_replicas: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--replicas",
            "Engines side by side, each with the whole model, behind one queue. Threads, --memory and --kv-cache are "
            "divided; --max-num-seqs and --max-num-batched-tokens are each one's.",
            "Processor and device",
            default="1",
            is_served_only=True,
        ),
    )
    expert_parallel: bool = field(
        default=False,
        metadata=_option(
            "switch",
            "--expert-parallel/--no-expert-parallel",
            "Have each replica compute some of every layer's experts for all replicas, as work arrives. So an expert "
            "is read from memory once for the tokens of all. Same answers to the bit.",
            "Processor and device",
            is_served_only=True,
        ),
    )
    listen_ranks: str | None = field(
        default=None,
        metadata=_option(
            "text",
            "--listen-ranks",
            "[HOST:]PORT at which the other ranks join from other machines, with `moeflow join`. A port alone takes "
            "only processes of this machine.",
            "Processor and device",
            default="ranks are processes of this machine",
        ),
    )
    cluster_token_file: Path | None = field(
        default=None,
        metadata=_option(
            "existing file",
            "--cluster-token-file",
            "The secret that ranks of other machines, and lenders of memory, have a copy of; made if it is not there.",
            "Processor and device",
            default="cluster-token in the cache folder",
        ),
    )
    ray_address: str | None = field(
        default=None,
        metadata=_option(
            "text",
            "--ray-address",
            "HOST:PORT of a Ray cluster that starts the other ranks on its nodes, and restarts them when they end. "
            "auto: this machine's cluster. Ranks join at --listen-ranks.",
            "Processor and device",
            default="ranks of other machines are started there",
            is_served_only=True,
        ),
    )
    ray_placement: str = field(
        default="strict-spread",
        metadata=_option(
            "choice",
            "--ray-placement",
            "Where Ray starts ranks: each on a node of its own, or (spread) as far as there are nodes.",
            "Processor and device",
            choices=RAY_PLACEMENTS,
            is_served_only=True,
        ),
    )
    remote_experts: str | None = field(
        default=None,
        metadata=_option(
            "text",
            "--remote-experts",
            "HOST:PORT of machines that lend memory (`moeflow lend`), separated by commas. They keep and compute "
            "experts that do not fit into --memory, as far as that is faster than reading them from disk.",
            "Expert cache",
        ),
    )
    device: str = field(
        default="auto",
        metadata=_option(
            "text",
            "--device",
            "Where to compute: cpu, cuda, cuda:1. cuda:MEMORY (experimental) uses that much of a GPU, and streams "
            "experts that do not fit. emulated:MEMORY,GB_PER_S emulates a GPU and its PCIe link. Append ,t4 to slow "
            "down computing in the same proportion, or ,torch to compute with torch like a GPU.",
            "Processor and device",
            is_common=True,
        ),
    )
    device_memory_bytes: int | None = field(
        default=None,
        metadata=_option(
            "bytes",
            "--device-memory",
            "Maximum memory of a GPU to use, such as 16GiB.",
            "Processor and device",
            default="all that is free",
        ),
    )
    pipeline: str | None = field(
        default=None,
        metadata=_option(
            "choice",
            "--pipeline",
            "How weights are streamed to a device that is smaller than the model.",
            "Processor and device",
            choices=tuple(OFFLOADING),
            default="cgopipe",
        ),
    )
    micro_batch: int | None = field(
        default=None,
        metadata=_option(
            "count", "--micro-batch", "Tokens of a pipeline's micro-batch.", "Processor and device", default="32"
        ),
    )
    resident_experts: float | None = None  # share of them that stays on such a device
    speculators: tuple[str, ...] = field(
        default=(),
        metadata=_option(
            "texts",
            "--speculator",
            "Drafts the next tokens, and the model verifies them in one pass, as far as that is faster. Answers "
            "stay the same. auto: suffix, and speculators from `moeflow train speculator` for this model. suffix: "
            "from the prompt and earlier answers. PATH[:FORMAT]: a small model with the same tokenizer, in its "
            "own integers or int8 unless another format is given. dense-source: the source of the built-in model. "
            "self:int8: the model itself, quantized. early-exit[:LAYERS]: its first layers, if it was trained "
            "for that. May be given several times.",
            "Speculation",
            default="none",
        ),
    )
    expert_capacity: int | None = field(
        default=None,
        metadata=_option(
            "count",
            "--expert-capacity",
            "Tokens of an encoder's input that each expert takes; those beyond skip it, as when Switch Transformers "
            "are trained.",
            "Experts of encoders",
            default="all",
        ),
    )
    lossy_routing: str | None = field(
        default=None,
        metadata=_option(
            "choice",
            "--lossy-routing",
            "The network of `moeflow train predictor` chooses an encoder's experts instead of the routers, one for "
            "each token or three. Answers change where it errs, and the model's name shows that.",
            "Experts of encoders",
            default="routers choose",
            choices=tuple(LOSSY_ROUTING),
        ),
    )
    generation_config: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--generation-config",
            "Sampling defaults of requests. auto: those of the model's generation_config.json or GGUF metadata; none: "
            "temperature 1 and nothing else.",
            "Sampling",
            choices=GENERATION_CONFIGS,
        ),
    )
    expert_policy: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--expert-policy",
            "Expert cache eviction policy.",
            "Expert cache",
            choices=("auto", *POLICIES),
        ),
    )
    predictor: str = field(
        default="auto",
        metadata=_option(
            "choice",
            "--predictor",
            "Expert prefetch predictor, used where a trial shows that passes are faster with it. next-router:N: "
            "routers of up to N layers ahead. sida: the network of `moeflow train predictor`. combined: next-router, "
            "frequency, previous-token and the network, if there is one, weighed online.",
            "Expert cache",
            choices=("auto", *PREDICTORS, WHOLE_PASS, NO_PREDICTOR),
        ),
    )
    record_routing: Path | None = field(
        default=None,
        metadata=_option(
            "new file",
            "--record-routing",
            "Append the experts that each token used to this file, for `moeflow simulate cache`.",
            "Diagnostics",
        ),
    )
    trace_file: Path | None = field(
        default=None,
        metadata=_option(
            "new file",
            "--trace",
            "Write a trace of computing, reading and waiting at the end, for ui.perfetto.dev.",
            "Diagnostics",
        ),
    )
    graph_file: Path | None = field(
        default=None,
        metadata=_option(
            "new file",
            "--graph",
            "Write the tasks of the last pass, and what each waited for, at the end, for GraphViz.",
            "Diagnostics",
        ),
    )
    is_served: bool = field(default=False, metadata=_INTERNAL)  # by a process of its own, in memory_bytes, too
    shares_memory: bool = field(default=False, metadata=_INTERNAL)  # with other models: KV caches leave memory for them
    cpu_isa: str = ""  # the best instruction set that the CPU kernels may use; empty: the best there is
    cache_dir: Path | None = None  # where the built-in model, packed experts and prompts are kept

    def check_counts(self) -> None:
        """Check that numbers are at least 1, and that threads and processes are not absurdly many.

        Raises: ConfigError.
        """
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
            "num_ranks",
            "num_redundant_experts",
            "num_replicas",
            "max_model_len",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
            if value is not None and value > _MOST.get(name, value):
                raise ConfigError(
                    f"{name} must be at most {_MOST[name]}, not {truncated_repr(value)}; take as many as cores"
                )
