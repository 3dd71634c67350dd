"""A checkpoint's special tokens, including ones that `tokenizer.json` omits.

Settings have the keys of `tokenizer_config.json`. What transformers' PreTrainedTokenizerFast makes of them, to the
token: it is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer, processors

from moeflow.core.truncated_repr import truncated_repr

NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Token = str | AddedToken


class SpecialTokens(msgspec.Struct, frozen=True):
    """Tokens that are not part of a text: ones with a name for chat templates, and others."""

    named: dict[str, Token]
    others: list[Token]

    @property
    def texts(self) -> dict[str, str]:
        """The texts of those with names."""
        return {name: str(token) for name, token in self.named.items()}


def special_tokens(settings: Mapping[str, Any]) -> SpecialTokens:
    """Return the tokens that settings declare special. Raises: ValueError if one is no token."""
    named = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    named |= {key: value for key, value in settings.items() if key.endswith("_token") and isinstance(value, Token)}
    named |= settings.get("model_specific_special_tokens") or {}
    others = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or []
    if isinstance(others, Mapping):
        named, others = {**named, **others}, []
    if not isinstance(others, list):
        raise ValueError(f"extra_special_tokens is {truncated_repr(others)}, not a list of tokens")
    for name, token in [*named.items(), *(("extra_special_tokens", token) for token in others)]:
        if not isinstance(token, Token):
            raise ValueError(f"{name} is {truncated_repr(token)}, not a token")
    return SpecialTokens(named, others)


def teach(
    core: Tokenizer, settings: Mapping[str, Any], special: SpecialTokens, added: Mapping[int, AddedToken]
) -> None:
    """Make a tokenizer match whole all special tokens and those added, by id, and begin a prompt as it should.

    Raises: Exception, of any kind, if the tokenizers package refuses.
    """
    core.encode_special_tokens = settings.get("split_special_tokens", False)
    known = {token.content for token in (*core.get_added_tokens_decoder().values(), *added.values())}
    wanted: list[Token] = [added[token_id] for token_id in sorted(added)]
    for token in (*special.named.values(), *special.others):
        if str(token) not in known and token not in wanted:
            wanted.append(token)
    core.add_tokens([_marked(token, special) for token in wanted])
    if core.post_processor is None or settings.keys() & {"add_bos_token", "add_eos_token"}:
        core.post_processor = _frame(core, settings, special.texts)


def _marked(token: Token, special: SpecialTokens) -> AddedToken:
    """Return a token that knows that it is special, if it has a name."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if str(token) in special.texts.values():
        token.special = True
    return token


def _frame(core: Tokenizer, settings: Mapping[str, Any], texts: Mapping[str, str]) -> processors.TemplateProcessing:
    """Return what puts BOS before a prompt and EOS behind it, where they are wanted and there are such tokens."""
    bos = [texts["bos_token"]] if settings.get("add_bos_token") and "bos_token" in texts else []
    eos = [texts["eos_token"]] if settings.get("add_eos_token") and "eos_token" in texts else []
    first, second = (
        [*(f"{token}:{text}" for token in bos), f"${name}:{text}", *(f"{token}:{text}" for token in eos)]
        for text, name in enumerate("AB")
    )
    ids = [(token, core.token_to_id(token)) for token in dict.fromkeys(bos + eos)]
    return processors.TemplateProcessing(single=first, pair=first + second, special_tokens=ids)
