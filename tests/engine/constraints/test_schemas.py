"""A random model's answers at temperature 1 are as schemas say; what cannot be held to is refused by name."""

from __future__ import annotations

import json
import re
from contextlib import closing

import jsonschema
import pytest

from moeflow.core.errors import RequestError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.constraints.checker import GrammarChecker
from moeflow.llm import LLM
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import ChoiceForm, JsonForm, UserGrammar
from tests.engine.constraints.schemas import SUPPORTED, UNSUPPORTED
from tests.tiny_mixtral import write_tiny_mixtral

FEW = 6  # answers to each
SIGNS = '"}],'  # that end things: a random model would hardly write them


@pytest.fixture(scope="module")
def checker(llm):
    with closing(GrammarChecker(llm.tokenizer, llm.model.eos_token_ids)) as checker:
        yield checker


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_mixtral(folder, max_position_embeddings=1024)
    with LLM(folder, num_threads=1, max_num_seqs=16, kv_cache_bytes=2**24) as llm:
        yield llm


def answers(llm, grammars, **changes):
    """Return what the model says under each grammar, all in one batch."""
    signs = {llm.tokenizer.encode(sign, add_special_tokens=False)[0]: 3.0 for sign in SIGNS}
    params = [
        SamplingParams(**{"grammar": grammar, "n": FEW, "max_tokens": 400, "seed": 7, "logit_bias": signs, **changes})
        for grammar in grammars
    ]
    return [result.outputs for result in llm.generate(["x"] * len(params), params, progress=False)]


@pytest.mark.slow
def test_answers_are_as_their_schemas_say(llm, checker):
    grammars = [checker.check(plain_grammar(JsonForm(schema))) for schema in SUPPORTED.values()]
    num_whole = 0
    for (name, schema), outputs in zip(SUPPORTED.items(), answers(llm, grammars), strict=True):
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for output in outputs:
            if output.finish_reason == FinishReason.STOP:
                validator.validate(json.loads(output.text))
                num_whole += 1
            else:
                assert output.finish_reason == FinishReason.LENGTH, (name, output)
                assert len(output.token_ids) == 400
    assert num_whole > 0.9 * FEW * len(SUPPORTED)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_cannot_be_held_to_is_refused(checker, name):
    with pytest.raises(RequestError, match=r"form of the answer is not supported: .|cannot be enforced"):
        checker.check(plain_grammar(JsonForm(UNSUPPORTED[name])))


def test_the_unsupported_keyword_is_named(checker):
    for name in ("not", "uniqueItems", "contains", "unevaluatedProperties", "propertyNames", "minProperties"):
        with pytest.raises(RequestError, match=name):
            checker.check(plain_grammar(JsonForm(UNSUPPORTED[name])))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (ChoiceForm(["yes", "no", "per haps/"]), r"yes|no|per haps/"),
        (UserGrammar(r"[a-f]{3}(/[0-9]+)?", is_regex=True), r"[a-f]{3}(/[0-9]+)?"),
        (UserGrammar('start: "a" B+\nB: /[xy]/', is_regex=False), r"a[xy]+"),
        (UserGrammar('root ::= "a" item*\nitem ::= [x-y]', is_regex=False), r"a[xy]*"),
    ],
    ids=["choice", "regex", "lark", "gbnf"],
)
def test_other_forms(llm, checker, form, pattern):
    grammar = checker.check(plain_grammar(form), form if isinstance(form, UserGrammar) else None)
    (outputs,) = answers(llm, [grammar], logit_bias={})
    for output in outputs:
        if output.finish_reason == FinishReason.STOP:
            assert re.fullmatch(pattern, output.text)
    assert any(output.finish_reason == FinishReason.STOP for output in outputs)


def test_limits_go_before(llm, checker):
    """The form ends an answer also where more tokens were to come, and max_tokens cuts it."""
    grammar = checker.check(plain_grammar(ChoiceForm(["abcdef"])))
    for changes in ({"min_tokens": 50}, {"ignore_eos": True}, {"temperature": 0.0}, {"logit_bias": {}}):
        (outputs,) = answers(llm, [grammar], n=1, **changes)
        assert (outputs[0].text, outputs[0].finish_reason) == ("abcdef", FinishReason.STOP)
    (outputs,) = answers(llm, [grammar], n=1, max_tokens=3)
    assert (outputs[0].text, outputs[0].finish_reason) == ("abc", FinishReason.LENGTH)


def test_min_tokens_is_kept_where_the_form_allows_it(llm, checker):
    grammar = checker.check(plain_grammar(UserGrammar("[a-z]*", is_regex=True)), UserGrammar("[a-z]*", is_regex=True))
    (outputs,) = answers(llm, [grammar], min_tokens=30, logit_bias={1: 20.0})
    assert all(len(output.text) >= 30 for output in outputs)


def test_log_probabilities_are_the_models_own(llm, checker):
    grammar = checker.check(plain_grammar(ChoiceForm(["abcdef"])))
    (outputs,) = answers(llm, [grammar], n=1, logprobs=0)
    prompt = llm.tokenizer.encode("xabcdef", add_special_tokens=False)
    (free,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), progress=False)
    expected = [token.logprob for token in free.prompt_logprobs[1:]]
    assert [token.logprob for token in outputs[0].logprobs[:6]] == expected


def test_a_form_that_leads_nowhere_fails_its_request(llm):
    (outputs,) = answers(llm, [plain_grammar(JsonForm({"type": "string", "pattern": "^\\x07$"}))], n=1)
    assert outputs[0].finish_reason is FinishReason.ERROR
    assert "nothing can follow" in outputs[0].error


def test_a_grammar_that_is_none_fails_its_request_alone(llm):
    params = [SamplingParams(grammar="start: nothing", max_tokens=3), SamplingParams(max_tokens=3, temperature=0)]
    bad, good = llm.generate(["x", "x"], params, progress=False)
    assert "the form of the answer is not supported" in bad.outputs[0].error
    assert len(good.outputs[0].token_ids) == 3
