"""What the files beside `tokenizer.json` declare of its special and added tokens, brought into one form.

Newer models list added tokens in `tokenizer_config.json`; older ones have `special_tokens_map.json` and
`added_tokens.json`, which then go before it, and `tokenizer.json` itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from moeflow.core.truncated_repr import truncated_repr
from moeflow.text.special_tokens import NAMES

_OTHERS: Final = "extra_special_tokens"
_OWN_NAMES: Final = "model_specific_special_tokens"


def declared_tokens(
    config: Mapping[str, Any],
    special_tokens_map: Mapping[str, Any],
    added_tokens: Mapping[str, Any],
    core: Tokenizer,
) -> tuple[dict[str, Any], dict[int, AddedToken]]:
    """Return settings with the special tokens of all files, and the added tokens by id.

    `config` is what `tokenizer_config.json` holds, `special_tokens_map` and `added_tokens` what the files of these
    names do; `core` is what `tokenizer.json` gives.

    Raises: TypeError, ValueError or AttributeError if a file holds something else.
    """
    written = _with_own_names(config)
    if "added_tokens_decoder" in written:
        table = _revived(written["added_tokens_decoder"])
        added = {int(token_id): _as_token(token) for token_id, token in table.items()}
        by_text = _by_text(added.values())
    else:
        written |= _from_map(special_tokens_map, written)
        listed, own = _from_list(added_tokens, written), core.get_added_tokens_decoder()
        added = listed | own
        by_text = _by_text([*listed.values(), *own.values()])
    settings: dict[str, Any] = _revived(written)
    settings |= {name: by_text.get(str(settings[name]), settings[name]) for name in NAMES if settings.get(name)}
    return settings, added


def _with_own_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the tokens that only this model has a name for under one key, and the others under one."""
    settings = dict(config)
    if not settings.get(_OTHERS) and "additional_special_tokens" in settings:
        settings[_OTHERS] = settings.pop("additional_special_tokens")
    texts = [key for key, value in settings.items() if key.endswith("_token") and isinstance(value, str)]
    own = {key: settings.pop(key) for key in texts if key not in NAMES}
    if isinstance(settings.get(_OTHERS), dict):
        own |= settings.pop(_OTHERS)
    return settings | ({_OWN_NAMES: own} if own else {})


def _from_map(special_tokens_map: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `special_tokens_map.json`; special tokens without a usual name add to those known."""
    found = {key: _as_special(value) for key, value in special_tokens_map.items() if key != _OTHERS}
    others = special_tokens_map.get(_OTHERS, [])
    if isinstance(others, dict):
        return found | {_OWN_NAMES: {**(written.get(_OWN_NAMES) or {}), **others}}
    together = list(written.get(_OTHERS) or ())
    for token in map(_as_special, others):
        if token not in together:
            together.append(token)
    return found | ({_OTHERS: together} if _OTHERS in special_tokens_map else {})


def _from_list(added_tokens: Mapping[str, Any], written: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return the tokens of `added_tokens.json`, which knows ids alone.

    As in transformers, none is special on the word of an object in `tokenizer_config.json`, where texts were meant.
    """
    special = {str(written[name]) for name in NAMES if written.get(name)}
    special |= {str(token) for token in written.get(_OTHERS) or ()}
    return {
        int(token_id): AddedToken(text, normalized=text not in special, special=text in special)
        for text, token_id in added_tokens.items()
    }


def _by_text(tokens: Iterable[AddedToken]) -> dict[str, AddedToken]:
    return {token.content: token for token in tokens}


def _revived(value: Any) -> Any:
    """Return settings with the tokens in them that were written as objects."""
    if isinstance(value, list):
        return [_revived(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("__type") == "AddedToken":
        return AddedToken(**{key: item for key, item in value.items() if key != "__type"})
    return {key: _revived(item) for key, item in value.items()}


def _as_special(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_special(item) for item in value]
    return AddedToken(**{**value, "special": True}) if isinstance(value, dict) and "content" in value else value


def _as_token(value: Any) -> AddedToken:
    if isinstance(value, dict):
        return AddedToken(**value)
    if isinstance(value, AddedToken):
        return value
    raise TypeError(f"{truncated_repr(value)} in added_tokens_decoder is no token")
