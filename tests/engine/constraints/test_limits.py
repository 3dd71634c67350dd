"""Limits of grammars are found before an engine gets them; limits that an answer meets later fail its request alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from string import ascii_lowercase
from threading import Event

import pytest
from llguidance import LLMatcher, LLParserLimits

from moeflow.core.errors import RequestError
from moeflow.core.request import FinishReason
from moeflow.core.sampling_params import SamplingParams
from moeflow.engine.constraints import compiled_grammar
from moeflow.engine.constraints.checker import NUM_KEPT, GrammarChecker
from moeflow.engine.constraints.compiled_grammar import CompiledGrammar
from moeflow.engine.constraints.constraints import Constraints
from moeflow.engine.constraints.grammar_tokens import tokens_of
from moeflow.engine.constraints.limits import LIMITS
from moeflow.text.answer_form.answer_grammar import plain_grammar
from moeflow.text.answer_form.form import ChoiceForm, JsonForm, UserGrammar
from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tokenizer import Tokenizer
from moeflow.text.tool_syntax.tool import Tool
from moeflow.text.tool_syntax.written_values import written_value
from tests.engine.constraints.test_schemas import llm  # noqa: F401  # a fixture

AMBIGUOUS = (
    "start: a a a a a a a a a a a a\na: b* c* d*\nb: /[a-z ]/\nc: /[a-z ]/ | b b\nd: /[a-z ]/ | c c | b d"  # 100 bytes
)
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
NOTHING = "nothing can follow"
TOO_MUCH = "more steps to follow than are allowed"


def regex(text: str) -> UserGrammar:
    return UserGrammar(text, is_regex=True)


def grammar(text: str) -> UserGrammar:
    return UserGrammar(text, is_regex=False)


def properties(number: int) -> JsonForm:
    return JsonForm({"type": "object", "properties": {f"property_{i}": {"type": "string"} for i in range(number)}})


class WideTokenizer:
    """The end, every byte, many words and long spaces: masks take as much as with real vocabularies."""

    def __init__(self) -> None:
        rng = random.Random(0)
        words = {"".join(rng.choices(f"{ascii_lowercase} ", k=rng.randint(2, 12))) for _ in range(40_000)}
        words |= {" " * length for length in range(2, 65)}
        self._tokens = [b"", *[bytes([byte]) for byte in range(256)], *[word.encode() for word in sorted(words)]]
        self.vocab_size = len(self._tokens)
        self.special_token_ids = self.marker_ids = frozenset({0})

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]


@pytest.fixture(scope="module")
def checker():
    with closing(GrammarChecker(WideTokenizer(), [0])) as checker:
        yield checker


def check(checker: GrammarChecker, form) -> str:
    return checker.check(plain_grammar(form), form if isinstance(form, UserGrammar) else None)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (regex("\\"), "ends in a backslash"),
        (regex("a\\\\\\"), "ends in a backslash"),
        (regex(r"[^\s\S]"), NOTHING),
        (regex("^(.{0,1000}){0,60}x$"), TOO_MUCH),
        (regex("(a{1000}){1000}"), "more than 0.5 s|more steps|needs too much"),
        (grammar("start: start"), NOTHING),
        (grammar("start: a\na: b\nb: a"), NOTHING),
        (grammar("root ::= root"), NOTHING),
        (grammar("start: /[^\\s\\S]/"), NOTHING),
        (grammar(AMBIGUOUS), "Too many items .limit 20000"),
        (JsonForm({"$ref": "#"}), NOTHING),
        (JsonForm(MUTUAL), NOTHING),
        (JsonForm({"anyOf": [{"$ref": "#"}]}), NOTHING),
        (JsonForm({"allOf": [{"$ref": "#"}]}), NOTHING),
        (JsonForm({"type": "string", "pattern": r"[^\s\S]"}), "Regex is empty"),
        (JsonForm({"type": "string", "pattern": "^(.{0,1000}){0,60}x$"}), TOO_MUCH),
        (properties(600), "max is 2000"),
    ],
)
def test_a_limit_is_found_before_an_engine_gets_the_grammar(checker, form, reason):
    for _ in range(2):  # it is remembered
        with pytest.raises(RequestError, match=reason):
            check(checker, form)


@pytest.mark.parametrize("form", [regex("a\\\\"), regex("[0-9]{3}"), grammar('start: ""'), properties(300)])
def test_what_can_be_followed_is_accepted(checker, form):
    assert check(checker, form) == check(checker, form)


@pytest.mark.slow
@pytest.mark.parametrize(
    "form", [properties(20_000), grammar("\n".join(f"r{i} ::= r{i + 1}" for i in range(30_000)) + '\nr30000 ::= "z"')]
)
def test_what_takes_too_long_ends_its_process(checker, form):
    with pytest.raises(RequestError, match=r"needs too much|not supported"):
        check(checker, form)
    check(checker, regex("[a-z]{7}"))


def test_as_many_choices_as_are_promised(llm):  # noqa: F811
    choices = [f"{i} choices" for i in range(4_096)]
    with closing(GrammarChecker(llm.tokenizer, llm.model.eos_token_ids)) as checker:
        params = SamplingParams(grammar=check(checker, ChoiceForm(choices)), n=4, seed=3, max_tokens=40)
    (result,) = llm.generate(["x"], params, progress=False)
    assert {output.finish_reason for output in result.outputs} == {FinishReason.STOP}
    assert {output.text for output in result.outputs} <= set(choices)


def test_thousands_of_values_of_an_argument(llm, checker):  # noqa: F811
    values = [f"value {i}" for i in range(3_000)]
    schema = {"type": "string", "enum": values}
    tool = Tool("pick", None, {"type": "object", "properties": {"x": schema}})
    lark = LarkWriter((), lambda text: None)
    text = lark.grammar(written_value(lark, tool, "x", schema, "</x>"))
    assert checker.check(text) == text
    matcher = LLMatcher(tokens_of(llm.tokenizer, [1]), text, limits=LIMITS)
    for said, is_taken in (
        ("value 2999</x>", True),
        ("value 3000</x>", False),
        ("value 29</x>", True),
        ("</x>", False),
    ):
        tokens = llm.tokenizer.encode(said, add_special_tokens=False)
        copy = matcher.deep_copy()
        assert (copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()) is is_taken


def test_a_check_forgets_the_oldest(checker, monkeypatch):
    asked = []
    ask = checker._ask
    monkeypatch.setattr(checker, "_ask", lambda request: asked.append(request) or ask(request))
    forms = [regex(f"a{{{i}}}") for i in range(1, NUM_KEPT + 2)]
    for form in [*forms, forms[-1], forms[1], forms[0]]:
        check(checker, form)
    assert [request.user_text for request in asked] == [form.text for form in [*forms, forms[0]]]


def test_a_limit_that_one_request_meets_does_not_fail_another(llm, monkeypatch):  # noqa: F811
    """Requests with one grammar share the states of its words."""
    limits = LLParserLimits(initial_lexer_fuel=300_000, step_lexer_fuel=3_000, verbose_errors=False)
    monkeypatch.setattr(compiled_grammar, "LIMITS", limits)
    tokens = tokens_of(llm.tokenizer, [1])
    form = plain_grammar(JsonForm({"type": "string", "pattern": "^(.{0,90}){0,20}x$|^ab$"}))
    found = CompiledGrammar(tokens, form)
    one, other = found.constraint(), found.constraint()
    quote, a = llm.tokenizer.encode('"', add_special_tokens=False) + llm.tokenizer.encode("a", add_special_tokens=False)
    answer = [quote]
    while (mask := one.masks(answer, [[]])[0]).error is None:
        answer.append(a)
        assert len(answer) < 100
    assert "cannot be held to its form" in mask.error
    alone = CompiledGrammar(tokens, form).constraint().masks([quote], [[]])
    assert alone[0].error is None
    for constraint in (other, found.constraint()):
        assert constraint.masks([quote], [[]]) == alone


def test_requests_with_one_grammar_take_turns(llm):  # noqa: F811
    """A lock of llguidance's would hold up all of Python, and with it the engine's passes."""
    found = CompiledGrammar(tokens_of(llm.tokenizer, [1]), "start: /[a-z]+/")
    one, other = found.constraint(), found.constraint()
    copy, is_inside, may_go = one._copy, Event(), Event()

    def slow_copy():
        is_inside.set()
        assert may_go.wait(60)
        return copy()

    one._copy = slow_copy
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(one.masks, [], [[]])
        assert is_inside.wait(60)
        second = threads.submit(other.masks, [], [[]])
        assert not wait([second], 0.2).done
        may_go.set()
        assert first.result(60) == second.result(60)


def test_a_grammar_is_compiled_once_for_all_that_ask_meanwhile(llm, monkeypatch):  # noqa: F811
    may_compile, compiled = Event(), []

    class Compiled:
        def __init__(self, tokens, text) -> None:
            if text == "slow":
                may_compile.wait(60)
            compiled.append(text)

    monkeypatch.setattr(compiled_grammar, "CompiledGrammar", Compiled)
    with closing(Constraints(llm.model.path, [1])) as constraints:
        slow = [constraints.compiled("slow") for _ in range(5)]
        constraints.compiled("quick").result(60)
        assert compiled == ["quick"]
        may_compile.set()
        assert len({id(one.result(60)) for one in slow}) == 1
        assert compiled == ["quick", "slow"]


def test_a_process_that_was_ended_is_replaced_at_once(checker):
    check(checker, regex("[a-z]{8}"))
    idle = checker._processes._idle
    before = idle[-1]

    def ask(request, max_reply_bytes):
        raise RequestError("it needs too much")

    before.ask = ask
    with pytest.raises(RequestError, match="needs too much"):
        check(checker, regex("[a-z]{9}"))
    assert not before.is_alive
    assert idle
    assert idle[-1].is_alive
    check(checker, regex("[a-z]{9}"))


def test_the_vocabulary_is_loaded_once_ahead_of_the_first_form(llm, monkeypatch):  # noqa: F811
    loaded = []
    load = Tokenizer.load
    monkeypatch.setattr(Tokenizer, "load", lambda path: loaded.append(path) or load(path))
    with closing(Constraints(llm.model.path, [1])) as constraints:
        constraints.load_ahead()
        constraints._compiling.submit(bool).result(60)
        assert len(loaded) == 1
        constraints.load_ahead()
        constraints.compiled("start: /a/").result(60)
        assert len(loaded) == 1


def test_files_that_are_gone_fail_the_requests_with_forms_alone(tmp_path):
    with closing(Constraints(str(tmp_path), [1])) as constraints:
        for _ in range(2):
            constraints.load_ahead()
            with pytest.raises(RequestError, match=r"tokenizer\.json: is missing"):
                constraints.compiled("start: /a/").result(60)
