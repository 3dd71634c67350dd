"""Builds a tokenizer from the vocabulary inside a GGUF file.

GGUF has a tokenizer kind, a pre-tokenizer, and lists of tokens, merges or scores. They become the same pipeline as in
the model's `tokenizer.json`. A pre-tokenizer that is not known is refused: with
the wrong one everything seems to work, on the wrong tokens. A file without a name gets the rule `default`, with a
notice. Knows nothing of chat templates or of weights.

Source: llama.cpp's src/llama-vocab.cpp; oracle: transformers' own GGUF reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moeflow.checkpoint.gguf.token_ids import NO_TOKEN
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated_repr
from moeflow.text.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # token types
_REMEDY = "Use the model's Hugging Face folder instead, or convert it to GGUF again with a current llama.cpp"
_DEFAULT = "default"  # llama.cpp's rule for files without a name
_PRE = "tokenizer.ggml.pre"


def build_tokenizer(metadata: Mapping[str, Any], file: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer, and its special tokens and flags in the keys of `tokenizer_config.json`.

    Raises: CheckpointError if the file holds no tokenizer, or one that is not known or contradicts itself.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CheckpointError("holds no tokenizer", file=file, remedy=_REMEDY)
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _sentence_piece}
    if kind not in builders:
        raise CheckpointError(f"has a tokenizer of the unknown kind {truncated_repr(kind)}", file=file, remedy=_REMEDY)
    special = _special_tokens(metadata, tokens, file)
    try:
        tokenizer = builders[kind](metadata, tokens)
    except Exception as error:  # the tokenizers package raises bare exceptions
        raise CheckpointError(f"has an unusable tokenizer: {error}", file=file, remedy=_REMEDY) from error
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type") or [])
    has_bos = _begins_with_bos(metadata) and "bos_token" in special
    has_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos_token" in special
    return tokenizer, {**special, "add_bos_token": has_bos, "add_eos_token": has_eos}


def unnamed_notice(metadata: Mapping[str, Any]) -> str:
    """Return a warning if a file does not name its pre-tokenizer; otherwise an empty text."""
    if metadata.get("tokenizer.ggml.model") != "gpt2" or metadata.get(_PRE):
        return ""
    return f"does not name its pre-tokenizer ({_PRE}); {_DEFAULT!r} cuts the text, which makes answers worse. {_REMEDY}"


def _pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """Return the rule that cuts the text. Raises: ValueError if its name is not known."""
    name = metadata.get(_PRE) or _DEFAULT
    rule = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if rule is None:
        raise ValueError(
            f"the pre-tokenizer {truncated_repr(name)} is not known; known are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return rule


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    rule = _pre_tokenizer(metadata)
    model = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=_stored_merges(metadata),
        ignore_merges=rule.has_whole_words,
    )
    tokenizer = Tokenizer(model)
    if rule.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = rule.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = _stored(metadata, "tokenizer.ggml.merges")
    return [(left, right) for left, right in (merge.split(" ") for merge in merges)]


def _stored(metadata: Mapping[str, Any], key: str) -> list[Any]:
    if not isinstance(metadata.get(key), list):
        raise ValueError(f"the file has no {key}")
    found: list[Any] = metadata[key]
    return found


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """SentencePiece's BPE. Gemma 4 stores its merges; elsewhere the scores give their order."""
    vocab = {token: i for i, token in enumerate(tokens)}
    is_gemma4 = metadata["tokenizer.ggml.model"] == "gemma4"
    merges = (
        _stored_merges(metadata) if is_gemma4 else _scored_merges(vocab, _stored(metadata, "tokenizer.ggml.scores"))
    )
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", NO_TOKEN)
    unknown = tokens[0 if unknown_id == NO_TOKEN else unknown_id]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    has_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma4))
    scheme = "first" if has_space else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if has_space else []
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _scored_merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
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


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str], file: Path) -> dict[str, str]:
    special: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id in (None, NO_TOKEN):
            continue
        if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"names token {token_id} as {key} token, but has {len(tokens)}", file=file, remedy=_REMEDY
            )
        special[f"{name}_token"] = tokens[token_id]
    return special


def _begins_with_bos(metadata: Mapping[str, Any]) -> bool:
    """Return whether a prompt begins with BOS: what the file says, else what llama.cpp does for the vocabulary.

    Conversions of Gemma 4 say no by mistake.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gemma4":
        return True
    has_bos = kind == "llama" or _pre_tokenizer(metadata).has_bos
    return bool(metadata.get("tokenizer.ggml.add_bos_token", has_bos))
