"""A text's fewest tokens against how many it really has; what the bound cannot be known for."""

from __future__ import annotations

import sys
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

from moeflow.core.errors import ContextLengthError
from moeflow.text.token_length import TokenLength, token_length
from tests.engine.fakes import byte_level_core, byte_level_tokenizer, sentence_piece_vocabulary, smollm2_file, wrap


def copy(core):
    return CoreTokenizer.from_str(core.to_str())


def with_nfc():
    core = copy(byte_level_core())
    core.normalizer = normalizers.NFC()
    core.add_tokens([AddedToken("Ωmega", normalized=True), AddedToken("<think>", normalized=False)])
    return core


def without_some_bytes():
    """Like SmolLM2's, which lacks control characters and what UTF-8 never holds."""
    vocab = {char: i for i, char in enumerate(sorted({*pre_tokenizers.ByteLevel.alphabet()} - {"Ą", "ñ", "a"}))}
    vocab["bc"] = len(vocab)
    core = CoreTokenizer(models.BPE(vocab, [("b", "c")]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return core


def with_byte_fallback(*, lacks=()):
    tokens, _ = sentence_piece_vocabulary()
    vocab = {token: i for i, token in enumerate(token for token in tokens if token not in lacks)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    core = CoreTokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


CORES = {
    "byte level": byte_level_core(),
    "NFC": with_nfc(),
    "lacking bytes": without_some_bytes(),
    "byte fallback": with_byte_fallback(),
}
if smollm2_file() is not None:
    from tests.engine.fakes import smollm2_tokenizer

    CORES["SmolLM2"] = smollm2_tokenizer()._core

JAMO = "\u1100\u1161\u11a8"  # nine bytes that NFC composes to three
PIECES = st.sampled_from(
    [JAMO, "K\u0323\u0301", "\u212a", "\u1fef", "Ωmega", "<think>", "<|end|>", "\x04", "\x04" * 50, " " * 40, "▁▁"]
) | st.sampled_from(["the quick", "a", "bcbc", "🙂", "\U00040000", "########" * 12, "\n\n", "1234567"])
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=12).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("name", CORES)
@settings(max_examples=40)
@given(text=TEXTS)
@example(text="\x04" * 1000)
@example(text="a" * 1000)
@example(text=JAMO * 300)
@example(text=" " * 1000)
@example(text="▁" * 1000)
def test_no_text_has_fewer_tokens(name, text):
    known = token_length(CORES[name])
    assert known is not None
    encoding = CORES[name].encode(text, add_special_tokens=False)
    assert known.fewest_tokens(text.encode()) <= len(encoding.ids)


@pytest.mark.parametrize("name", CORES)
def test_the_bound_is_reached_within_what_normalizing_may_take(name):
    core = CORES[name]
    known = token_length(core)
    longest = max(len(token.encode()) for token in core.get_vocab())
    assert longest / 2 <= known.max_bytes <= 3 * (longest + 1)  # characters for bytes may take two; NFC shortens


def test_what_the_vocabulary_drops_is_not_counted():
    known = token_length(without_some_bytes())
    assert sorted(known.dropped) == [0x04, ord("a"), 0xF1]
    assert without_some_bytes().encode("a" * 100).ids == []
    assert known.fewest_tokens(b"a" * 100 + b"b" * 5) == 3


@pytest.mark.slow
def test_composing_never_shortens_more_than_three_times():
    """Every character against the longest of its canonical equivalents, which NFC may compose to it."""
    equivalents: dict[str, int] = {}
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        composed = unicodedata.normalize("NFC", char)
        longest = max(len(char.encode()), len(unicodedata.normalize("NFD", char).encode()))
        equivalents[composed] = max(equivalents.get(composed, 0), longest)
    assert max(longest / len(composed.encode()) for composed, longest in equivalents.items()) == 3


def changed(**parts):
    core = copy(byte_level_core())
    for name, part in parts.items():
        setattr(core, name, part)
    return core


def with_added(**flags):
    core = copy(byte_level_core())
    core.add_tokens([AddedToken("<mask>", **flags)])
    return core


@pytest.mark.parametrize(
    "core",
    [
        changed(normalizer=normalizers.StripAccents()),
        changed(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        changed(normalizer=normalizers.Replace("  ", "x")),
        changed(normalizer=normalizers.Replace(Regex(" +"), "xxxx")),
        changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])),
        changed(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
        ),
        with_added(lstrip=True),
        with_added(rstrip=True),
        with_byte_fallback(lacks=("<0x41>",)),
        CoreTokenizer(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True)),
        CoreTokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
        CoreTokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)),
    ],
)
def test_tokens_of_any_length_have_no_bound(core):
    assert token_length(core) is None


def test_a_text_that_is_too_long_is_not_tokenized(monkeypatch):
    tokenizer = wrap(byte_level_core())
    text = "the fox " * 1000
    num_tokens = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, max_tokens=num_tokens)) == num_tokens
    monkeypatch.setattr(tokenizer, "_core", None)
    with pytest.raises(
        ContextLengthError, match=r"maximum context length is 10 tokens.* not tokenized: it has at least so many"
    ):
        tokenizer.encode(text, max_tokens=10)


def test_a_text_that_may_fit_is_tokenized():
    tokenizer = byte_level_tokenizer()
    limit = token_length(byte_level_core()).max_bytes * 10
    assert len(tokenizer.encode("x" * limit, max_tokens=10)) == limit  # too long, but that is for others to say
    with pytest.raises(ContextLengthError):
        tokenizer.encode("x" * (limit + 1), max_tokens=10)


def test_a_text_of_few_bytes_does_not_wait_for_its_bound(monkeypatch):
    tokenizer = wrap(byte_level_core())
    monkeypatch.setattr("moeflow.text.tokenizer.token_length", None)  # takes as long as a short start
    assert tokenizer.encode("the fox", max_tokens=7) == tokenizer.encode("the fox")
    with pytest.raises(TypeError):
        tokenizer.encode("the fox", max_tokens=6)


def test_counting():
    assert TokenLength(4).fewest_tokens(b"") == 0
    assert TokenLength(4).fewest_tokens(b"12345") == 2
