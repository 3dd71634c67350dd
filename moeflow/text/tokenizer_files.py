"""A checkpoint's tokenizer as its files have it: `tokenizer.json` and files around it, or a GGUF file's header.

Needs the tokenizers package alone: transformers takes most of a second to import. Tests compare the result with
transformers for the same files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from tokenizers import AddedToken, Tokenizer

from moeflow.checkpoint.gguf.header import read_gguf_header
from moeflow.checkpoint.json_file import read_json_object
from moeflow.checkpoint.regular_file import read_whole
from moeflow.core.errors import CheckpointError
from moeflow.core.truncated_repr import truncated
from moeflow.core.units import MIB
from moeflow.text.chat_template_files import named_templates, read_chat_templates, write_chat_templates
from moeflow.text.declared_tokens import declared_tokens
from moeflow.text.gguf_tokenizer import build_tokenizer, unnamed_notice
from moeflow.text.special_tokens import NAMES, SpecialTokens, special_tokens, teach

_MAX_TOKENIZER_BYTES: Final = 64 * MIB  # vocabularies of a quarter of a million tokens take half as much
_MAX_TOKENIZER_SIGNS: Final = (
    3_000_000  # of JSON, likewise; half a gigabyte, without which the tokenizers package aborts
)
_COPY: Final = (
    "Copy it from the original model, or write it with transformers' "
    "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
)
_CONVERT: Final = (
    "Make it of tiktoken.model with transformers' TikTokenConverter(vocab_file=.., pattern=..).converted().save(..); "
    "the pattern is in the model's tokenization_*.py, which is code, and no code of a model is run"
)
_DOWNLOAD_AGAIN: Final = "Download the tokenizer's files again"
_CONFIG: Final = "tokenizer_config.json"
_RANKS: Final = "tiktoken.model"  # ranks of tokens; the splitting pattern is in code next to it
_FAST_CLASS: Final = "PreTrainedTokenizerFast"  # the name that older versions of transformers know, too
_NOT_SAVED: Final = frozenset(
    (
        # written elsewhere, or under other names
        *("chat_template", "added_tokens_decoder", "add_bos_token", "add_eos_token"),
        *("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"),
        # of the place that they came from
        *("name_or_path", "is_local", "local_files_only", "special_tokens_map_file", "tokenizer_file", "vocab_file"),
        # of code that does not come along
        *("auto_map", "backend", "device_map", "init_inputs", "slow_tokenizer_class", "fast_tokenizer_files"),
    )
)


class TokenizerParts(msgspec.Struct, frozen=True):
    """A tokenizer, the tokens that are special in it, its chat templates by name, and where they came from.

    `settings` have the keys of `tokenizer_config.json`. `notice` is a warning for the user.
    """

    core: Tokenizer
    special: SpecialTokens
    chat_templates: dict[str, str]
    settings: Mapping[str, Any]
    source: Path
    notice: str = ""


def read_folder(folder: Path) -> TokenizerParts:
    """Read a Hugging Face folder. Raises: CheckpointError if there is no tokenizer or it is damaged."""
    core = _read_core(folder / "tokenizer.json")
    settings = _read_optional(folder / _CONFIG)
    _check_versions(settings, folder / _CONFIG)
    templates = read_chat_templates(folder, settings)
    # Whether a prompt begins with BOS is for tokenizer.json to say: the settings of many a model contradict it.
    settings = {key: value for key, value in settings.items() if key not in ("add_bos_token", "add_eos_token")}
    special_tokens_map = _read_optional(folder / "special_tokens_map.json")
    added_tokens = _read_optional(folder / "added_tokens.json")
    with _blame_settings(folder):
        settings, added = declared_tokens(settings, special_tokens_map, added_tokens, core)
        return assemble(core, settings, templates, folder, added)


def read_gguf(file: Path) -> TokenizerParts:
    """Read a GGUF file. Raises: CheckpointError if there is no tokenizer or it is damaged."""
    metadata = read_gguf_header(file).metadata
    core, settings = build_tokenizer(metadata, file)
    templates = named_templates(metadata.get("tokenizer.chat_template"), file)
    with _blame_settings(file):
        parts = assemble(core, settings, templates, file)
    return msgspec.structs.replace(parts, notice=unnamed_notice(metadata))


def assemble(
    core: Tokenizer,
    settings: Mapping[str, Any],
    chat_templates: dict[str, str],
    source: Path,
    added: Mapping[int, AddedToken] | None = None,
) -> TokenizerParts:
    """Combine a tokenizer with its settings, their special tokens, and tokens added by id.

    Raises: ValueError if a special token is none; Exception, of any kind, if the tokenizers package refuses.
    """
    if core.padding is not None:
        settings = {"pad_token": core.padding["pad_token"], **settings}
    special = special_tokens(settings)
    teach(core, settings, special, added or {})
    return TokenizerParts(core, special, chat_templates, settings, source)


def write_folder(parts: TokenizerParts, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat templates into a folder. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in parts.settings.items() if key not in _NOT_SAVED}
    texts = parts.special.texts
    settings = {key: value for key, value in settings.items() if key not in texts}
    settings |= {name: text for name, text in texts.items() if name in NAMES} | {"tokenizer_class": _FAST_CLASS}
    if own_names := {name: text for name, text in texts.items() if name not in NAMES}:
        settings["model_specific_special_tokens"] = own_names
    if parts.special.others:
        settings["extra_special_tokens"] = [str(token) for token in parts.special.others]
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False, default=str)
    (folder / _CONFIG).write_text(text + "\n", encoding="utf-8")
    write_chat_templates(folder, parts.chat_templates)
    parts.core.save(str(folder / "tokenizer.json"))


@contextmanager
def _blame_settings(source: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the tokenizers package raises bare ones
        raise CheckpointError(
            f"has settings of its tokenizer that cannot be used: {truncated(str(error))}",
            file=source,
            remedy=_DOWNLOAD_AGAIN,
        ) from error


def _read_core(file: Path) -> Tokenizer:
    if not os.path.lexists(file):
        remedy = _CONVERT if os.path.lexists(file.with_name(_RANKS)) else _COPY
        raise CheckpointError("is missing, so text cannot be turned into tokens", file=file, remedy=remedy)
    data = read_whole(file, _MAX_TOKENIZER_BYTES)
    if sum(data.count(sign) for sign in (b",", b":", b"[", b"{")) > _MAX_TOKENIZER_SIGNS:
        raise CheckpointError(
            f"holds more than {_MAX_TOKENIZER_SIGNS} signs between values, which no tokenizer does",
            file=file,
            remedy=_DOWNLOAD_AGAIN,
        )
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # the tokenizers package raises bare ones
        raise CheckpointError(
            f"cannot be read as a tokenizer: {truncated(str(error))}", file=file, remedy=_DOWNLOAD_AGAIN
        ) from error


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json_object(file) if os.path.lexists(file) else {}


def _check_versions(settings: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError if there is another tokenizer for newer versions of transformers."""
    if settings.get("fast_tokenizer_files", ["tokenizer.json"]) != ["tokenizer.json"]:
        raise CheckpointError(
            "names several tokenizers, for several versions of transformers",
            file=file,
            remedy="Load the tokenizer with transformers' AutoTokenizer and save it again, which leaves the newest",
        )
