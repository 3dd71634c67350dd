"""The documented structured answer is complete whatever a model chooses, so on every instruction set, too."""

from __future__ import annotations

import re
import typing
from contextlib import closing

import pydantic
import pytest
from openai.lib._parsing._completions import type_to_response_format_param

from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.constraints.checker import GrammarChecker
from moeflow.llm import LLM
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import JsonForm
from tests.documents import ROOT
from tests.tiny_mixtral import write_tiny_mixtral

NUM_ANSWERS = 16


def documented_example() -> str:
    """Return the block of the guide to tools that asks for a structured answer."""
    text = (ROOT / "docs/guides/tools.md").read_text()
    (block,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "response_format=" in block)
    return block


@pytest.mark.slow
def test_every_answer_is_whole(tmp_path):
    """A random model of one token a byte, which ends strings only where it has to, writes the longest answers."""
    definition, _, asking = documented_example().partition("client = ")
    assert "max_tokens" not in asking  # the context alone limits the answer
    names: dict[str, typing.Any] = {}
    exec(compile(definition, "guide", "exec", dont_inherit=True), names)
    city: type[pydantic.BaseModel] = names["City"]
    form = type_to_response_format_param(city)["json_schema"]["schema"]
    write_tiny_mixtral(tmp_path, max_position_embeddings=1024)
    with LLM(tmp_path, num_threads=1, max_num_seqs=NUM_ANSWERS, kv_cache_bytes=2**24) as llm:
        with closing(GrammarChecker(llm.tokenizer, llm.model.eos_token_ids)) as checker:
            grammar = checker.check(plain_grammar(JsonForm(form)))
        (quote,) = llm.tokenizer.encode('"', add_special_tokens=False)
        params = SamplingParams(
            grammar=grammar, n=NUM_ANSWERS, max_tokens=None, temperature=2.0, seed=1, logit_bias={quote: -100.0}
        )
        (result,) = llm.generate(["x"], params, progress=False)
    assert [output.finish_reason for output in result.outputs] == [FinishReason.STOP] * NUM_ANSWERS
    for output in result.outputs:
        city.model_validate_json(output.text)
