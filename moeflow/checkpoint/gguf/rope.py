"""How far a GGUF model's rotary positions are stretched, in Hugging Face's terms.

GGUF writes linear and YaRN scaling as metadata, but Llama 3's as the finished table of factors, from which
the settings are found again here. LongRoPE's two tables are taken as they are; others have no counterpart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.gguf.header import GGUFTensor
from moeflow.core.errors import CheckpointError
from moeflow.core.model_config import ConfigReader
from moeflow.core.truncated_repr import truncated_repr

ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_TABLES: Final = {"long": "rope_factors_long.weight", "short": "rope_factors_short.weight"}
ReadTable = Callable[[str], Sequence[float]]  # by its name
_STILL: Final = 1e29  # least divisor of pairs that do not turn

# The only settings that Llama 3 models were published with; the factor itself differs and is in the table.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def scaling_from_metadata(reader: ConfigReader) -> dict[str, Any] | None:
    """Return `rope_scaling` as a config.json has it; None if positions are not stretched."""
    factor = reader.get(float, "rope.scaling.factor", reader.get(float, "rope.scale_linear", 0.0))
    kind = reader.get(str, "rope.scaling.type", "linear")
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise reader.error(f"'rope.scaling.type' is {truncated_repr(kind)}, where none, linear or yarn is expected")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": reader.positive(
            "rope.scaling.original_context_length", reader.positive("context_length")
        ),
        "beta_fast": reader.get(float, "rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": reader.get(float, "rope.scaling.yarn_beta_slow", 1.0),
    }


def scaling_from_tables(read_table: ReadTable, reader: ConfigReader) -> dict[str, Any]:
    """Return LongRoPE's scaling, whose tables for short texts and long ones the file has.

    Raises: CheckpointError.
    """
    scale = reader.number("rope.scaling.attn_factor", 1.0, least=1e-3, most=1e3)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": reader.positive("rope.scaling.original_context_length"),
    }
    for length, name in LONG_TABLES.items():
        scaling |= {f"{length}_factor": list(read_table(name)), f"{length}_mscale": scale}
    return scaling


def turning_share(factors: Sequence[float], reader: ConfigReader) -> float:
    """Return the share of pairs, the first ones, with angles that grow with the position. Angles of others are divided
    by 1e30.

    A share below 1 includes half a pair more, because readers round down.

    Raises: CheckpointError if a table has other factors.
    """
    num_turning = sum(factor == 1.0 for factor in factors)
    if list(factors) != [1.0] * num_turning + [factor for factor in factors if factor >= _STILL]:
        raise reader.error("the table of rotary factors is not Gemma 4's, and no other is supported")
    return 1.0 if num_turning == len(factors) else (num_turning + 0.5) / len(factors)


def read_factors(
    tensors: Mapping[str, GGUFTensor], head_dim: int, read_table: ReadTable, file: Path | str
) -> Sequence[float] | None:
    """Return the table of rotary factors [D/2]; None: the file has none. Raises: CheckpointError."""
    table = tensors.get(ROPE_FACTORS)
    if table is None:
        return None
    if table.shape != (head_dim // 2,):
        raise CheckpointError(
            f"has the shape {list(table.shape)}, where [{head_dim // 2}] is expected",
            file=file,
            tensor=ROPE_FACTORS,
            remedy="Convert the model again",
        )
    return read_table(ROPE_FACTORS)


def scaling_from_factors(factors: Sequence[float], theta: float, reader: ConfigReader) -> dict[str, Any] | None:
    """Return the Llama 3 scaling that a table of factors [D/2] was made from; None if all are 1.

    Raises: CheckpointError if no Llama 3 scaling gives this table.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    factor = max(factors)
    wavelengths = [2 * math.pi * theta ** (i / len(factors)) for i in range(len(factors))]
    if not 0.0 < factor < math.inf or not all(
        math.isclose(have, _llama3_factor(wavelength, factor), rel_tol=1e-3)
        for have, wavelength in zip(factors, wavelengths, strict=True)
    ):
        raise reader.error("the table of rotary factors is not Llama 3's, and no other is supported")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_factor(wavelength: float, factor: float) -> float:
    """Return by what Llama 3 divides the rotary frequency of a wavelength (in tokens)."""
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
