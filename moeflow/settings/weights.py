"""Settings of weights: formats and the packed file."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moeflow.kernels.weight_format import DTYPES, MIXES, QUANTIZED
from moeflow.settings.option import setting

_setting = partial(setting, group="Weights")


@dataclass(frozen=True, kw_only=True)
class WeightSettings:
    """Formats and files of weights."""

    dtype: str = _setting(
        "--dtype",
        "choice",
        "Weight data type; auto: the checkpoint's own, or the one that fits.",
        default="auto",
        choices=("auto", *DTYPES),
        depends_on=("quantize",),
    )
    quantize: str | None = _setting(
        "--quantize",
        "choice",
        "Quantize weights: smaller and faster, not quite the same answers. int8, int4: rounded in groups of 32. "
        "q4_k, q4_k_m: four bits of better quality, best after `moeflow pack` (see its --help).",
        choices=(*QUANTIZED, *MIXES),
        is_common=True,
        depends_on=("dtype",),
    )
    exact_activations: bool = _setting(
        "--exact-activations/--fast-activations",
        "switch",
        "Activations for a file's integer weights. Exact: 16 bits, with next to no loss. Fast: 8 bits in groups "
        "of 32 (llama.cpp: of 256), which makes prefill half as fast again.",
        default=False,
    )
    packed_weights_file: Path | None = _setting(
        "--packed-weights",
        "existing file",
        "Packed weights that `moeflow pack` wrote: loading takes a moment; with --memory, written if missing.",
        shown_default="in the cache folder",
        depends_on=("dtype", "quantize", "device"),
    )
