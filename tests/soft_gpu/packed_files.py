"""Tiny models whose files have packed weights, each beside floats of the same values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from studies.small_families import write_small
from tests.checkpoint.block_models import as_q4_k_m, write_block_model
from tests.checkpoint.packings import QUANTIZATIONS
from tests.checkpoint.quantized_models import write_quantized_model

Written = tuple[Path, Path]  # the packed model, and the floats
_LINEAR: Final = re.compile(r"model\.layers\..*(_proj|_proj_with_mqa|_proj_qkvz)\.weight$")
_EXPERTS: Final = re.compile(r"(model\.layers\..*\.experts\.(gate_up|down)_proj)$")


def _folder(family: str, quantization: str, folder: Path, *, has_attention: bool = True) -> Written:
    """Write experts of `quantization`, and with `has_attention` all else in layers."""
    write_quantized_model(folder, family, quantization, lambda name: has_attention or "experts" in name)
    return folder / "quantized", folder / "plain"


def _file(kind_of: Callable[[str], str], folder: Path, family: str = "qwen3moe") -> Written:
    """Write a GGUF file, which is read as floats, too."""
    folder.mkdir()
    file = write_block_model(folder / "model.gguf", family, kind_of)
    return file, file


def _uniform(kind: str, name: str) -> str:
    return "F32" if "ffn_gate_inp" in name else kind


def _small(family: str, quantization: str, folder: Path) -> Written:
    """Write a small model of a family, and replace matrices of its layers, or experts that are stacked."""
    packed, plain = folder / "packed", folder / "plain"
    write_small(family, plain, initializer_range=0.1)
    settings, store, _ = QUANTIZATIONS[quantization]
    floats = load_file(plain / "model.safetensors")
    parts = dict[str, torch.Tensor]()
    for seed, (name, weight) in enumerate(list(floats.items())):
        if stack := _EXPERTS.match(name):  # [E, columns, rows]
            count, cols, rows = weight.shape
            stored, values = store(count * rows, cols, seed)
            floats[name] = values.view(count, rows, cols).transpose(1, 2).contiguous()
            for part, tensor in stored.items():
                own = f"{stack[1]}{part.removeprefix('weight')}"
                parts[own] = tensor.view(count, rows, *tensor.shape[1:])
        elif _LINEAR.match(name) and quantization != "mxfp4":
            stored, floats[name] = store(*weight.shape, seed)
            parts |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in stored.items()}
        else:
            parts[name] = weight
    config = json.loads((plain / "config.json").read_text())
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(parts, packed / "model.safetensors")
    save_file(floats, plain / "model.safetensors")
    return packed, plain


CASES: Final[Mapping[str, Callable[[Path], Written]]] = {
    "gpt_oss mxfp4": partial(_small, "gpt_oss", "mxfp4"),
    "fp8": partial(_folder, "qwen3_moe", "fp8"),
    "awq": partial(_folder, "mixtral", "awq"),
    "gptq 32": partial(_folder, "qwen3_moe", "gptq 32", has_attention=False),
    "q8_0": partial(_file, partial(_uniform, "Q8_0")),
    "q4_k_m": partial(_file, as_q4_k_m),
    "llama q4_k_m": partial(_file, as_q4_k_m, family="llama"),
    "q5_k_m": partial(_file, lambda name: as_q4_k_m(name).replace("Q4", "Q5")),
    "q5_0 iq4_nl": partial(_file, lambda name: "IQ4_NL" if "down" in name else _uniform("Q5_0", name)),
    "gptq 8": partial(_folder, "mixtral", "gptq 8"),
    "iq4_xs": partial(_file, partial(_uniform, "IQ4_XS")),
    "deepseek_v3 fp8": partial(_small, "deepseek_v3", "fp8"),
    "qwen2_moe gptq 32": partial(_small, "qwen2_moe", "gptq 32"),
    "qwen3_next gptq 32": partial(_small, "qwen3_next", "gptq 32"),
    "qwen3_next fp8": partial(_small, "qwen3_next", "fp8"),
}
