"""Settings of processes that share a model: ranks, stages, replicas, other machines."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeflow.core.parallel_config import ATTENTION_LAYOUTS, EXPERT_LAYOUTS, EXPERT_PLACEMENTS, RAY_PLACEMENTS
from moeflow.parallel.placement.layouts import ADDED_LAYOUTS
from moeflow.settings.device import GROUP, MAX_THREADS
from moeflow.settings.option import setting

_setting = partial(setting, group=GROUP)


@dataclass(frozen=True, kw_only=True)
class SharingSettings:
    """Ranks that share a model, and replicas that each have all of it."""

    num_ranks: int | None = _setting(
        "--ranks",
        "count",
        "Processes that share the model, with the same answers to the bit; threads are divided.",
        shown_default="1",
        most=MAX_THREADS,
        depends_on=("device",),
    )
    stages: str | None = _setting(
        "--stages",
        "text",
        "Stages that layers are cut into, each on ranks of its own: a number, or the layers of each, such as "
        "10,14. For models larger than one machine's memory, and for slow networks.",
        shown_default="1",
        depends_on=("num_ranks", "device"),
    )
    expert_placement: str = _setting(
        "--expert-placement",
        "choice",
        "Which rank has which experts: blocks by index, or moved while serving so that ranks get equal loads "
        "(load, and auto).",
        default="auto",
        choices=("auto", *EXPERT_PLACEMENTS),
        depends_on=("num_ranks", "expert_layout"),
    )
    num_redundant_experts: int | None = _setting(
        "--redundant-experts",
        "count",
        "Replicas of the most used experts of each layer, over all ranks.",
        shown_default="none",
        depends_on=("num_ranks", "expert_layout", "expert_placement"),
    )
    expert_layout: str = _setting(
        "--expert-layout",
        "choice",
        "Each rank's share of a layer's experts: some of them (expert), or a slice of every one (sliced). Slices "
        "keep ranks equally busy whatever routers choose. auto: the faster by forecast.",
        default="auto",
        choices=("auto", *EXPERT_LAYOUTS, *ADDED_LAYOUTS),
        depends_on=("num_ranks",),
    )
    attention_layout: str = _setting(
        "--attention-layout",
        "choice",
        "Each rank's share of attention, dense layers and the output projection: all (replicated), or a part "
        "(tensor). A part has the keys and values of its own heads only. auto: the faster by forecast.",
        default="auto",
        choices=("auto", *ATTENTION_LAYOUTS),
        depends_on=("num_ranks",),
    )
    num_replicas: int | None = _setting(
        "--replicas",
        "count",
        "Engines side by side, each with the whole model, behind one queue. Threads, --memory and --kv-cache are "
        "divided; --max-num-seqs and --max-num-batched-tokens are each one's.",
        shown_default="1",
        is_served_only=True,
        most=MAX_THREADS,
        depends_on=("device",),
    )
    expert_parallel: bool = _setting(
        "--expert-parallel/--no-expert-parallel",
        "switch",
        "Have each replica compute some of every layer's experts for all replicas, as work arrives. So an expert "
        "is read from memory once for the tokens of all. Same answers to the bit.",
        default=False,
        is_served_only=True,
        depends_on=("num_replicas",),
    )
    listen_ranks: str | None = _setting(
        "--listen-ranks",
        "text",
        "[HOST:]PORT at which the other ranks join from other machines, with `moeflow join`. A port alone takes "
        "only processes of this machine.",
        shown_default="ranks are processes of this machine",
    )
    cluster_token_file: Path | None = _setting(
        "--cluster-token-file",
        "existing file",
        "The secret that ranks of other machines, and lenders of memory, have a copy of; made if it is not there.",
        shown_default="cluster-token in the cache folder",
    )
    ray_address: str | None = _setting(
        "--ray-address",
        "text",
        "HOST:PORT of a Ray cluster that starts the other ranks on its nodes, and restarts them when they end. "
        "auto: this machine's cluster. Ranks join at --listen-ranks.",
        shown_default="ranks of other machines are started there",
        is_served_only=True,
    )
    ray_placement: str = _setting(
        "--ray-placement",
        "choice",
        "Where Ray starts ranks: each on a node of its own, or (spread) as far as there are nodes.",
        default="strict-spread",
        choices=RAY_PLACEMENTS,
        is_served_only=True,
    )
