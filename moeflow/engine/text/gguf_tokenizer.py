"""Builds a tokenizer from the vocabulary inside a GGUF file.

GGUF names a tokenizer kind and a pre-tokenizer and lists tokens, merges or scores; here these become the same
pipeline that the model's `tokenizer.json` would describe. A pre-tokenizer that is not known is refused: with
the wrong one everything seems to work, on the wrong tokens. Knows nothing of chat templates or of weights.

Source: llama.cpp's src/llama-vocab.cpp for names and patterns; oracle: transformers' own GGUF reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from moeflow.core.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # token types
_REMEDY = "Use the model's Hugging Face folder instead, or convert it to GGUF again with a current llama.cpp"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe"), _LLAMA3)
_SPLITS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2) | {"tekken": _TEKKEN, "gpt-4o": _O200K}
_GPT2 = ("gpt-2", "olmo", "mpt", "phi-2")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_WHOLE_WORDS_FIRST = (_LLAMA3, _TEKKEN)  # a word that is a token is not merged from its parts


def build_tokenizer(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and its special tokens and flags in the keys of `tokenizer_config.json`.

    Raises: CheckpointError if the file holds no tokenizer, or one that is not known or contradicts itself.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("holds no tokenizer", file=file, remedy=_REMEDY)
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece}
    if kind not in builders:
        raise CheckpointError(f"has a tokenizer of the unknown kind {kind!r}", file=file, remedy=_REMEDY)
    try:
        tokenizer = builders[kind](metadata, tokens)
    except Exception as error:  # the tokenizers package raises bare exceptions
        raise CheckpointError(f"has an unusable tokenizer: {error}", file=file, remedy=_REMEDY) from error
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    return tokenizer, _config(metadata, tokens, file)


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    split = _SPLITS.get(str(name))
    if split is not None:
        before: list[Any] = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    elif name in _SINGLE_DIGITS:
        before = [pre_tokenizers.Digits(individual_digits=True)]
    elif name in _GPT2:
        before = []
    else:
        raise ValueError(f"the pre-tokenizer {name!r} is not known")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=split in _WHOLE_WORDS_FIRST
    )
    tokenizer = Tokenizer(model)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE. Its merges are not stored: the scores give the order in which they apply."""
    vocab = {token: i for i, token in enumerate(tokens)}
    scores = metadata["tokenizer.ggml.scores"]
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    model = models.BPE(vocab=vocab, merges=_merges(vocab, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    scheme = "first" if has_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if has_space else []
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every way to make a token from two others, those of the best score first."""
    found = []
    for token, token_id in vocab.items():
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = sorted(
            (vocab[left], vocab[right], left, right) for left, right in pairs if left in vocab and right in vocab
        )
        found += [(scores[token_id], len(left), len(right), left, right) for _, _, left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Make control and user-defined tokens match whole in a text."""
    typed = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED])


def _config(metadata: Mapping[str, Any], tokens: list[str], file: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"names token {token_id} as {key} token, but has {len(tokens)}", file=file, remedy=_REMEDY
            )
        config[f"{name}_token"] = tokens[token_id]
    # files without this key: llama.cpp begins with BOS for SentencePiece and Llama 3, not for other vocabularies
    has_bos = (
        metadata.get("tokenizer.ggml.model") == "llama"
        or _SPLITS.get(metadata.get("tokenizer.ggml.pre", "")) == _LLAMA3
    )
    config["add_bos_token"] = bool(metadata.get("tokenizer.ggml.add_bos_token", has_bos)) and "bos_token" in config
    config["add_eos_token"] = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in config
    return config
