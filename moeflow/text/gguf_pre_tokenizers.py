"""How a GGUF file's text is cut before its pieces become tokens: one rule for each name in `tokenizer.ggml.pre`.

A file has only the name. The rule comes from `tokenizer.json` of the models with that name, or from the model's code.
Some patterns of llama.cpp differ, because its regular expressions are simpler.

Source: llama.cpp's conversion and src/llama-vocab.cpp for the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tokenizers import Regex, pre_tokenizers

_DIGIT: Final = r"\p{N}"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = _LLAMA3.replace("{1,3}", "")
_QWEN35: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED_CODER: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KIMI: Final = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",  # noqa: RUF001
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Letters that have cases. Those written as numbers change when an editor normalizes the file.
_CASED: Final = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7d"
    "ᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"  # noqa: RUF001
    "ﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"  # noqa: RUF001
)
_ASIAN: Final = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LLM: Final = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",  # noqa: RUF001
    r"\s+$",
    _ASIAN,
    _DIGIT,
)
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, _DIGIT)
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")


class PreTokenizer(NamedTuple):
    """How a family's text becomes pieces. `has_bos` holds for files that do not have the key."""

    patterns: tuple[str, ...]  # each cuts the pieces of those before: its matches, and the text between them
    is_composed: bool = False  # whether characters are composed first (Unicode's NFC)
    has_whole_words: bool = False  # whether a piece that is a token is not merged from its parts
    has_bos: bool = False  # whether a prompt begins with the token BOS

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the tokenizers package's object, which also spells bytes as GPT-2 does."""
        cuts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*map(_step, self.patterns), cuts])


def _step(pattern: str) -> Any:
    if pattern == _DIGIT:  # as `tokenizer.json` has it; it knows digits of a newer Unicode than the expression
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _rules() -> dict[str, PreTokenizer]:
    llama3 = PreTokenizer((_LLAMA3,), has_whole_words=True, has_bos=True)
    rules = dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "midm-2.0", "pixtral", "lfm2"), llama3
    )
    rules |= dict.fromkeys(("dbrx", "glm4"), PreTokenizer((_LLAMA3,)))
    rules |= dict.fromkeys(("qwen2", "f2llmv2"), PreTokenizer((_QWEN2,), is_composed=True))
    rules |= dict.fromkeys(("deepseek-r1-qwen", "megrez"), PreTokenizer((_QWEN2,)))
    rules |= dict.fromkeys(("gpt-4o", "minimax-m2", "kanana2"), PreTokenizer((_O200K,)))
    rules |= dict.fromkeys(("deepseek-v3", "joyai-llm"), PreTokenizer(_DEEPSEEK_V3))
    rules |= dict.fromkeys(("olmo", "mpt"), PreTokenizer((_GPT2,), is_composed=True))
    rules |= dict.fromkeys(
        ("gpt-2", "phi-2", "a.x-4.0", "gigachat", "granite-docling", "mellum", "trillion"), PreTokenizer((_GPT2,))
    )
    rules |= dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), PreTokenizer((_DIGIT, _GPT2))
    )
    return rules | {
        "default": PreTokenizer(_DEFAULT),
        "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
        "deepseek-llm": PreTokenizer(_DEEPSEEK_LLM),
        "hunyuan": PreTokenizer((_QWEN2,), is_composed=True, has_whole_words=True),
        "kimi-k2": PreTokenizer((_KIMI,), has_whole_words=True),
        "minicpm5": PreTokenizer((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), has_whole_words=True),
        "qwen35": PreTokenizer((_QWEN35,), is_composed=True),
        "seed-coder": PreTokenizer((_SEED_CODER,)),
        "tekken": PreTokenizer((_TEKKEN,), has_whole_words=True, has_bos=True),
    }


PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = _rules()
