"""Models with packed weights on the GPU in software: in their files' formats, with the tokens of the floats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soft_gpu.test_families import MOST_LAUNCHES, MOST_OF_FAMILY, of_layers, printed_by

pytest.importorskip("triton", reason="Triton has no wheel for this machine")

SMALL_LAYERS, LAYERS = 2, 3  # of models of studies/, and of tests/checkpoint/
CONVERSION = 1  # of the logits to float32
OF_A_STACK = 2  # launches more, of a layer with values in another format than queries and keys
Expected = dict[str, Any]
CASES: dict[str, tuple[Expected, int]] = {  # what the planner chooses, and launches of a decode pass at most
    "gpt_oss mxfp4": ({"format": "mxfp4", "routers": "bfloat16"}, MOST_LAUNCHES * SMALL_LAYERS),
    "gptq 32": ({"format": "int4-g32"}, MOST_LAUNCHES * LAYERS),
    "q4_k_m": ({"format": "q4_k", "head": "q6_k"}, MOST_LAUNCHES * LAYERS + OF_A_STACK * 2),
    "deepseek_v3 fp8": ({"format": "fp8"}, MOST_OF_FAMILY["deepseek_v3"] * SMALL_LAYERS),
    "qwen3_next fp8": ({"format": "fp8"}, 21 * SMALL_LAYERS),
}
MORE_CASES: dict[str, tuple[Expected, int]] = {  # the same kernels in other models, and formats of the same kind
    "fp8": ({"format": "fp8", "routers": "bfloat16"}, MOST_LAUNCHES * LAYERS),
    "awq": ({"format": "int4-g128"}, MOST_LAUNCHES * LAYERS),
    "q8_0": ({"format": "int8", "head": "int8"}, MOST_LAUNCHES * LAYERS),
    "llama q4_k_m": ({"format": "q4_k"}, MOST_LAUNCHES * LAYERS + OF_A_STACK * 2),
    "q5_k_m": ({"format": "q5_k", "head": "q6_k"}, MOST_LAUNCHES * LAYERS + OF_A_STACK * 2),
    "iq4_xs": ({"format": "bfloat16", "head": ""}, MOST_LAUNCHES * LAYERS),
    "qwen2_moe gptq 32": ({"format": "int4-g32"}, MOST_LAUNCHES * SMALL_LAYERS),
    "qwen3_next gptq 32": ({"format": "int4-g32"}, MOST_LAUNCHES * SMALL_LAYERS + OF_A_STACK),
    "q5_0 iq4_nl": ({"format": "q5_0", "head": "q5_0"}, MOST_LAUNCHES * LAYERS),
    "gptq 8": ({"format": "int8-g128"}, MOST_LAUNCHES * LAYERS),
}
MIXED = {  # formats of the first layer
    "qwen3_next gptq 32": {"q_proj": "int4-g32", "k_proj": "bfloat16", "up": "int4-g32"},
    "gpt_oss mxfp4": {"q_proj": "bfloat16", "o_proj": "bfloat16", "up": "mxfp4", "down": "mxfp4"},
    "gptq 32": {"q_proj": "bfloat16", "up": "int4-g32", "down": "int4-g32"},
    "q5_k_m": {"q_proj": "q5_k", "v_proj": "q6_k", "up": "q5_k", "down": "q6_k"},
    "q5_0 iq4_nl": {"q_proj": "q5_0", "up": "q5_0", "down": "iq4_nl"},
    "q4_k_m": {"q_proj": "q4_k", "k_proj": "q4_k", "v_proj": "q6_k", "up": "q4_k", "down": "q6_k"},
    "llama q4_k_m": {"q_proj": "q4_k", "v_proj": "q6_k", "up": "q4_k", "down": "q6_k"},
    "qwen3_next fp8": {"q_proj": "fp8", "k_proj": "bfloat16", "up": "fp8", "down": "bfloat16", "shared_down": "fp8"},
    "deepseek_v3 fp8": {"q_proj": "fp8", "k_proj": "fp8", "o_proj": "fp8", "up": "fp8", "down": "bfloat16"},
}
REASONS = {  # parts of them
    "gpt_oss mxfp4": "the file's mxfp4, no value changes; other weights are bfloat16",
    "q4_k_m": "the file's q4_k and q6_k, no value changes; other weights are bfloat16",
    "iq4_xs": "no kernel of theirs reads IQ4_XS",
    "deepseek_v3 fp8": "and no GPU kernel reads float8 in blocks of 128 x 128 there",
}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.thorough)])
def test_files_run_in_their_formats_and_give_the_tokens_of_their_values(cases: dict[str, tuple[Expected, int]]) -> None:
    found = printed_by("run_files", tuple(cases))
    assert set(found) == set(cases)
    for case, (expected, most) in cases.items():
        got = found[case]
        assert got["is_equal"], case
        assert got["is_hybrid_equal"], case  # with experts on the GPU, on the CPU, and some from disk
        assert got["num_tokens"] > 2, case  # answers are not one token alone
        assert {name: got[name] for name in expected} == expected, case
        assert of_layers(got["launches"]) <= most + CONVERSION, (case, got["launches"])
        assert REASONS.get(case, "") in got["reason"], case
        assert bool(got["layers"]) == (case in MIXED), case
        for part, weight_format in MIXED.get(case, {}).items():
            assert got["layers"][0][part] == weight_format, (case, part)
