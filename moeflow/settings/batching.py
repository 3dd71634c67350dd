"""Settings of requests that run together, and of prompts that they share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeflow.settings.option import setting

_setting = partial(setting, group="Batching")


@dataclass(frozen=True, kw_only=True)
class BatchingSettings:
    """Limits of requests and passes, and reuse of prompts."""

    max_model_len: int | None = _setting(
        "--max-model-len",
        "count",
        "Maximum context length: prompt and answer of one request, in tokens.",
        shown_default="the model's, or what fits",
        is_common=True,
    )
    max_num_seqs: int | None = _setting(
        "--max-num-seqs",
        "count",
        "Maximum concurrent requests.",
        shown_default="planned",
        is_common=True,
    )
    max_num_batched_tokens: int | None = _setting(
        "--max-num-batched-tokens",
        "count",
        "Maximum tokens of one pass: fewer shorten the pauses that long prompts cause.",
        shown_default="planned",
    )
    prefix_caching: bool = _setting(
        "--prefix-caching/--no-prefix-caching",
        "switch",
        "Reuse the KV cache of shared prefixes.",
        default=True,
    )
    prompt_cache: Path | None = _setting(
        "--prompt-cache",
        "folder",
        "Keep the KV cache of prompts and answers in this folder, too: after a restart, conversations resume at "
        "once. Engines may share it. Users who can read it can learn the conversations.",
        shown_default="none; with --prompt-cache-size: prompts in the cache folder",
    )
    prompt_cache_bytes: int | None = _setting(
        "--prompt-cache-size",
        "bytes",
        "Disk space for it, such as 50GiB: the least recently used prompts are deleted first.",
        shown_default="none; with --prompt-cache: 8GiB",
    )
