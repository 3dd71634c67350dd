"""The chat templates of a Hugging Face folder, by name: where all versions of transformers wrote them, and back.

A model's only template is called "default". Files of their own go before `tokenizer_config.json`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moeflow.checkpoint.file_errors import DOWNLOAD_AGAIN
from moeflow.checkpoint.json_file import MAX_CONFIG_BYTES, read_json_object
from moeflow.checkpoint.regular_file import read_whole
from moeflow.core.errors import ChatTemplateError, CheckpointError
from moeflow.core.truncated_repr import truncated_repr

_FILE: Final = "chat_template.jinja"
_FOLDER: Final = "additional_chat_templates"
_OLD_FILE: Final = "chat_template.json"  # of transformers 4, for some models
_DEFAULT: Final = "default"


def read_chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of a folder with these settings of `tokenizer_config.json`; none if it has none.

    Raises: CheckpointError if a file is damaged.
    """
    found = _read_files(folder) or named_templates(settings.get("chat_template"), folder / "tokenizer_config.json")
    old = folder / _OLD_FILE
    if not _without_empty(found) and os.path.lexists(old):
        found = named_templates(read_json_object(old).get("chat_template", False), old)
    return _without_empty(found)


def named_templates(value: Any, file: Path) -> dict[str, str]:
    """Return templates by name from what settings say: a text, a list or an object of texts, or nothing.

    Raises: CheckpointError if it is something else.
    """
    try:
        if isinstance(value, list):
            value = {template["name"]: template["template"] for template in value}
        templates = {_DEFAULT: value} if isinstance(value, str) else {} if value is None else dict(value)
        if not all(isinstance(text, str) for item in templates.items() for text in item):
            raise TypeError(f"{truncated_repr(templates)} are no templates by name")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"holds no chat template: {error}", file=file, remedy=DOWNLOAD_AGAIN) from error
    return templates


def choose_template(templates: Mapping[str, str]) -> str:
    """Return the template for conversations. Raises: ChatTemplateError if there are several, and no default."""
    if _DEFAULT not in templates:
        raise ChatTemplateError(
            f"the model's chat templates cannot be used: none of {truncated_repr(sorted(templates))} is the default"
        )
    return templates[_DEFAULT]


def write_chat_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Write templates as files of their own. Raises: CheckpointError if a name can be no file's; OSError."""
    for name, template in templates.items():
        if name == _DEFAULT:
            file = folder / _FILE
        elif Path(name).name == name:
            file = folder / _FOLDER / f"{name}.jinja"
        else:
            raise CheckpointError(
                f"has a chat template by the name {truncated_repr(name)}, which can be no file's",
                file="tokenizer_config.json",
                remedy="Give the template another name",
            )
        file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8")


def _read_files(folder: Path) -> dict[str, str]:
    default = folder / _FILE
    found = {_DEFAULT: _read_text(default)} if os.path.lexists(default) else {}
    return found | {file.stem: _read_text(file) for file in sorted((folder / _FOLDER).glob("*.jinja"))}


def _without_empty(templates: dict[str, str]) -> dict[str, str]:
    """Return no templates if the only one is empty."""
    return {} if templates == {_DEFAULT: ""} else templates


def _read_text(file: Path) -> str:
    """Return a file's text, its lines ended by a line feed, as Python reads text."""
    try:
        text = read_whole(file, MAX_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"holds no chat template: {error}", file=file, remedy=DOWNLOAD_AGAIN) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
