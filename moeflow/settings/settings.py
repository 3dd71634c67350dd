"""All settings of an engine: the values that the user set before anything is decided.

A field with an option is an option of the command line, too. `setting` declares both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from moeflow.core.errors import ConfigError
from moeflow.core.parallel_config import (
    ATTENTION_LAYOUTS,
    EXPERT_LAYOUTS,
    EXPERT_PLACEMENTS,
    RANK_SCHEDULES,
    RAY_PLACEMENTS,
)
from moeflow.core.truncated_repr import truncated, truncated_repr
from moeflow.experts.cache.policies import POLICIES
from moeflow.experts.predict.registry import NO_PREDICTOR, PREDICTORS, WHOLE_PASS
from moeflow.kernels.weight_format import DEVICE_DTYPES, MIXES, QUANTIZED
from moeflow.parallel.placement.layouts import ADDED_LAYOUTS
from moeflow.pipeline.catalog import OFFLOADING
from moeflow.settings.option import Option, setting

MAX_THREADS: Final = 1024  # more than machines have cores
LOSSY_ROUTING: Final = {"sida": 1, "sida:3": 3}  # experts in the place of each that a router chooses
GENERATION_CONFIGS: Final = ("auto", "none")

_INTERNAL: Final = {"is_internal": True}  # verbs set it, by how they run the engine; no user's choice
_weights = partial(setting, group="Weights")
_memory = partial(setting, group="Memory")
_batching = partial(setting, group="Batching")
_device = partial(setting, group="Processor and device")
_cache = partial(setting, group="Expert cache")
_lossy = partial(setting, group="Lossy experts")
_drafts = partial(setting, group="Speculation")
_sampling = partial(setting, group="Sampling")
_diagnostics = partial(setting, group="Diagnostics")


@dataclass(frozen=True, kw_only=True)
class Settings:  # one class for all topics: a dataclass takes half a millisecond of each start
    """The user's settings. None or "auto": to be decided."""

    model: str | None = None  # Hugging Face folder or GGUF file; None: the built-in model
    model_name: str | None = None
    dtype: str = _weights(
        "--dtype",
        "choice",
        "Weight data type; auto: the checkpoint's own, or the one that fits. float16 is for GPUs.",
        default="auto",
        choices=("auto", *DEVICE_DTYPES),
        depends_on=("quantize",),
    )
    quantize: str | None = _weights(
        "--quantize",
        "choice",
        "Quantize weights: smaller and faster, not quite the same answers. int8, int4: rounded in groups of 32. "
        "q4_k, q4_k_m: four bits of better quality, best after `moeflow pack` (see its --help).",
        choices=(*QUANTIZED, *MIXES),
        is_common=True,
        depends_on=("dtype",),
    )
    exact_activations: bool = _weights(
        "--exact-activations/--fast-activations",
        "switch",
        "Activations for a file's integer weights. Exact: 16 bits, with next to no loss. Fast: 8 bits in groups "
        "of 32 (llama.cpp: of 256), which makes prefill half as fast again.",
        default=False,
    )
    packed_weights_file: Path | None = _weights(
        "--packed-weights",
        "existing file",
        "Packed weights that `moeflow pack` wrote: loading takes a moment; with --memory, written if missing.",
        shown_default="in the cache folder",
        depends_on=("dtype", "quantize", "device"),
    )
    memory_bytes: int | None = _memory(
        "--memory",
        "bytes",
        "Memory for everything, such as 4GiB; experts that do not fit are read from disk.",
        is_common=True,
        depends_on=("device",),
    )
    kv_cache_bytes: int | None = _memory("--kv-cache", "bytes", "Memory for the KV cache, such as 2GiB.")
    kv_dtype: str = _memory(
        "--kv-dtype",
        "choice",
        "KV cache data type.",
        default="auto",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    max_model_len: int | None = _batching(
        "--max-model-len",
        "count",
        "Maximum context length: prompt and answer of one request, in tokens.",
        shown_default="the model's, or what fits",
        is_common=True,
    )
    max_num_seqs: int | None = _batching(
        "--max-num-seqs",
        "count",
        "Maximum concurrent requests.",
        shown_default="planned",
        is_common=True,
    )
    max_num_batched_tokens: int | None = _batching(
        "--max-num-batched-tokens",
        "count",
        "Maximum tokens of one pass: fewer shorten the pauses that long prompts cause.",
        shown_default="planned",
    )
    prefix_caching: bool = _batching(
        "--prefix-caching/--no-prefix-caching",
        "switch",
        "Reuse the KV cache of shared prefixes.",
        default=True,
    )
    prompt_cache: Path | None = _batching(
        "--prompt-cache",
        "folder",
        "Keep the KV cache of prompts and answers in this folder, too: after a restart, conversations resume at "
        "once. Engines may share it. Users who can read it can learn the conversations.",
        shown_default="none; with --prompt-cache-size: prompts in the cache folder",
    )
    prompt_cache_bytes: int | None = _batching(
        "--prompt-cache-size",
        "bytes",
        "Disk space for it, such as 50GiB: the least recently used prompts are deleted first.",
        shown_default="none; with --prompt-cache: 8GiB",
    )
    num_threads: int | None = _device(
        "--threads", "count", "CPU threads.", shown_default="all cores", is_common=True, most=MAX_THREADS
    )
    device: str = _device(
        "--device",
        "text",
        "Where to compute: cpu, cuda, cuda:1. cuda:MEMORY (experimental) uses that much of a GPU, and streams "
        "experts that do not fit. emulated:MEMORY,GB_PER_S emulates a GPU and its PCIe link. Append ,t4 to slow "
        "down computing in the same proportion, or ,torch to compute with torch like a GPU.",
        default="auto",
        is_common=True,
    )
    gpu_memory_bytes: int | None = _device(
        "--gpu-memory",
        "bytes",
        "Maximum memory of a GPU to use, such as 16GiB; the CPU computes experts that do not fit.",
        shown_default="all that is free",
        depends_on=("device",),
    )
    pipeline: str | None = _device(
        "--pipeline",
        "choice",
        "How weights are streamed to a device that is smaller than the model.",
        choices=tuple(OFFLOADING),
        shown_default="the fastest that fits",
        depends_on=("device",),
    )
    micro_batch: int | None = _device(
        "--micro-batch",
        "count",
        "Tokens of a pipeline's micro-batch.",
        shown_default="the fastest that fits",
        depends_on=("device",),
    )
    prompt_micro_batch: int | None = _device(
        "--prompt-micro-batch",
        "count",
        "Tokens of a pipeline's micro-batch of prompts.",
        shown_default="512, or those of a micro-batch if these are more",
        depends_on=("device",),
    )
    hosted_experts: float | None = field(  # share of experts that the host computes beside such a device
        default=None, metadata={"depends_on": ("device",)}
    )
    resident_experts: float | None = field(  # share of experts that stays on such a device
        default=None, metadata={"depends_on": ("device",)}
    )
    resident_kv: float | None = field(  # share of the layers whose keys and values stay on such a device
        default=None, metadata={"depends_on": ("device",)}
    )
    num_ranks: int | None = _device(
        "--ranks",
        "count",
        "Processes that share the model; threads are divided. On CPUs answers are the same to the bit. On GPUs each "
        "has its own, and sums are split among them.",
        shown_default="1, or as many GPUs as hold the model",
        most=MAX_THREADS,
        depends_on=("device",),
    )
    stages: str | None = _device(
        "--stages",
        "text",
        "Stages that layers are cut into, each on ranks of its own: a number, or the layers of each, such as "
        "10,14. For models larger than one machine's memory, and for slow networks.",
        shown_default="1",
        depends_on=("num_ranks", "device"),
    )
    expert_placement: str = _device(
        "--expert-placement",
        "choice",
        "Which rank has which experts: blocks by index, or moved while serving so that ranks get equal loads "
        "(load, and auto).",
        default="auto",
        choices=("auto", *EXPERT_PLACEMENTS),
        depends_on=("num_ranks", "expert_layout"),
    )
    num_redundant_experts: int | None = _device(
        "--redundant-experts",
        "count",
        "Replicas of the most used experts of each layer, over all ranks.",
        shown_default="none",
        depends_on=("num_ranks", "expert_layout", "expert_placement"),
    )
    expert_layout: str = _device(
        "--expert-layout",
        "choice",
        "Each rank's share of a layer's experts: some of them (expert), or a slice of every one (sliced). Slices "
        "keep ranks equally busy whatever routers choose. auto: the faster by forecast.",
        default="auto",
        choices=("auto", *EXPERT_LAYOUTS, *ADDED_LAYOUTS),
        depends_on=("num_ranks",),
    )
    attention_layout: str = _device(
        "--attention-layout",
        "choice",
        "Each rank's share of attention, dense layers and the output projection: all (replicated), a part (tensor), "
        "or all of some sequences (data). A rank has the keys and values of its heads or sequences only. auto: "
        "replicated or tensor, the faster by forecast.",
        default="auto",
        choices=("auto", *ATTENTION_LAYOUTS),
        depends_on=("num_ranks",),
    )
    rank_schedule: str = _device(
        "--rank-schedule",
        "choice",
        "Whether ranks compute one half of a pass while the other half waits for other ranks (asynchronous), or all "
        "tokens at once (synchronous). auto: halves for long prompts over slow links, by forecast.",
        default="auto",
        choices=RANK_SCHEDULES,
        depends_on=("num_ranks", "stages", "device"),
    )
    num_replicas: int | None = _device(
        "--replicas",
        "count",
        "Engines side by side, each with the whole model, behind one queue. Threads, --memory and --kv-cache are "
        "divided; --max-num-seqs and --max-num-batched-tokens are each one's.",
        shown_default="1",
        is_served_only=True,
        most=MAX_THREADS,
        depends_on=("device",),
    )
    max_replicas: int | None = _device(
        "--max-replicas",
        "count",
        "Replicas to have at most: with --ray-address, engines start while requests fill the others, and end after "
        "five minutes without need.",
        shown_default="as many as --replicas",
        is_served_only=True,
        depends_on=("num_replicas",),
    )
    target_first_token_s: float | None = _device(
        "--target-first-token",
        "seconds",
        "With --max-replicas: engines also start while the first token of more than a tenth of requests takes longer "
        "than so many seconds.",
        shown_default="no target",
        is_served_only=True,
        depends_on=("num_replicas",),
    )
    listen_ranks: str | None = _device(
        "--listen-ranks",
        "text",
        "[HOST:]PORT at which other machines join, with `moeflow join`: each as a rank, or as an engine "
        "(--replicas). A port alone takes only processes of this machine.",
        shown_default="all processes are on this machine; with --ray-address, an address of this node",
    )
    cluster_token_file: Path | None = _device(
        "--cluster-token-file",
        "existing file",
        "The secret that ranks of other machines, and lenders of memory, have a copy of; made if it is not there.",
        shown_default="cluster-token in the cache folder",
    )
    ray_address: str | None = _device(
        "--ray-address",
        "text",
        "HOST:PORT of a Ray cluster that starts the other ranks on its nodes, or with --replicas all engines. It "
        "restarts them when they end. auto: this machine's cluster.",
        shown_default="processes of other machines are started there",
        is_served_only=True,
    )
    ray_placement: str = _device(
        "--ray-placement",
        "choice",
        "Nodes of an engine's ranks on a Ray cluster: one for each rank, or (spread) as many as there are, or (pack) "
        "few.",
        default="strict-spread",
        choices=RAY_PLACEMENTS,
        is_served_only=True,
    )
    remote_experts: str | None = _cache(
        "--remote-experts",
        "text",
        "HOST:PORT of machines that lend memory (`moeflow lend`), separated by commas. They keep and compute "
        "experts that do not fit into --memory, as far as that is faster than reading them from disk.",
    )
    expert_policy: str = _cache(
        "--expert-policy",
        "choice",
        "Expert cache eviction policy.",
        default="auto",
        choices=("auto", *POLICIES),
    )
    predictor: str = _cache(
        "--predictor",
        "choice",
        "Expert prefetch predictor, used where a trial shows that passes are faster with it. next-router:N: "
        "routers of up to N layers ahead. sida: the network of `moeflow train predictor`. combined: next-router, "
        "frequency, previous-token and the network, if there is one, weighed online.",
        default="auto",
        choices=("auto", *PREDICTORS, WHOLE_PASS, NO_PREDICTOR),
    )
    capacity_factor: float | None = _lossy(
        "--capacity-factor",
        "number",
        "Lossy: with top-k of E experts, each takes at most k * factor / E of a pass's tokens, rounded up. Later "
        "choices are dropped and counted. An answer then depends on the other requests in its passes, the model's "
        "name shows that, and prefixes are not cached.",
        shown_default="experts take all",
    )
    lossy_routing: str | None = _lossy(
        "--lossy-routing",
        "choice",
        "The network of `moeflow train predictor` chooses experts instead of the routers: as many for each token, "
        "or three times as many. Not exact: answers change where it errs, and the model's name shows that.",
        shown_default="routers choose",
        choices=tuple(LOSSY_ROUTING),
    )
    speculators: tuple[str, ...] = _drafts(
        "--speculator",
        "texts",
        "Drafts the next tokens, and the model verifies them in one pass, as far as that is faster. Answers "
        "stay the same. auto: suffix, and speculators from `moeflow train speculator` for this model. suffix: "
        "from the prompt and earlier answers. PATH[:FORMAT]: a small model with the same tokenizer, in its "
        "own integers or int8 unless another format is given. dense-source: the source of the built-in model. "
        "self:int8: the model itself, quantized. early-exit[:LAYERS]: its first layers, if it was trained "
        "for that. May be given several times.",
        default=(),
        shown_default="none",
    )
    generation_config: str = _sampling(
        "--generation-config",
        "choice",
        "Sampling defaults of requests. auto: those of the model's generation_config.json or GGUF metadata; none: "
        "temperature 1 and nothing else.",
        default="auto",
        choices=GENERATION_CONFIGS,
    )
    record_routing: Path | None = _diagnostics(
        "--record-routing",
        "new file",
        "Append the experts that each token used to this file, for `moeflow simulate cache`.",
    )
    trace_file: Path | None = _diagnostics(
        "--trace",
        "new file",
        "Write a trace of computing, reading and waiting at the end, for ui.perfetto.dev.",
    )
    graph_file: Path | None = _diagnostics(
        "--graph",
        "new file",
        "Write the tasks of the last pass, and what each waited for, at the end, for GraphViz.",
    )
    is_served: bool = field(default=False, metadata=_INTERNAL)  # by a process of its own, in memory_bytes, too
    shares_memory: bool = field(default=False, metadata=_INTERNAL)  # with other models: KV caches leave memory for them
    cpu_isa: str = ""  # the best instruction set that the CPU kernels may use; empty: the best there is
    cache_dir: Path | None = None  # where the built-in model, packed experts and prompts are kept

    @property
    def num_replicas_here(self) -> int:
        """Engines on this machine; 1 if they are on others. Each of these is planned like this one."""
        return 1 if self.is_spread else self.num_replicas or 1

    @property
    def is_spread(self) -> bool:
        """Whether engines, or all ranks after the first, are on other machines."""
        return self.ray_address is not None or self.listen_ranks is not None

    def check_counts(self) -> None:
        """Check that numbers are at least 1, and that threads and processes are not absurdly many.

        Raises: ConfigError.
        """
        for name, option in options().items():
            value = getattr(self, name)
            if option.kind != "count" or value is None:
                continue
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
            if option.most is not None and value > option.most:
                raise ConfigError(
                    f"{name} must be at most {option.most}, not {truncated_repr(value)}; take as many as cores"
                )


def options() -> dict[str, Option]:
    """Return the fields of `Settings` that the command line sets, in the order of help."""
    return {it.name: it.metadata["option"] for it in dataclasses.fields(Settings) if "option" in it.metadata}


def written_files() -> list[str]:
    """Return the names of the fields of `Settings` that name a file which one engine writes, of one model."""
    return [name for name, option in options().items() if option.kind == "new file"]


def dependent_settings(name: str) -> list[str]:
    """Return the fields of `Settings` to decide anew when the user changes the one of this name."""
    return [it.name for it in dataclasses.fields(Settings) if name in it.metadata.get("depends_on", ())]


def given_options(settings: Settings, names: Iterable[str]) -> dict[str, Any]:
    """Return the values that the user gave of these fields of `Settings`: flag of the command line -> value."""
    known, defaults = options(), Settings()
    given = [name for name in names if getattr(settings, name) != getattr(defaults, name)]
    return {known[name].flag: getattr(settings, name) for name in given}


def user_settings() -> list[str]:
    """Return the names of the fields of `Settings` that users may set: all but the verbs' own."""
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
