"""The study's prompts: some sets that come along, or a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeflow.core.errors import ConfigError
from moeflow.core.untrusted import UnreadableError, parse_json, read_bounded
from moeflow.text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "prompts.json"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a set."""

    name: str  # the set's
    token_ids: list[int]


def read_prompts(file: Path | None, model_path: str) -> list[Prompt]:
    """Return the prompts of a JSON file {set: [text, ...]}, as the model's chat template has them, set by set.

    Raises: ConfigError if the file has another form.
    """
    file = file or BUNDLED
    try:
        sets = parse_json(read_bounded(file))
    except UnreadableError as error:
        raise ConfigError(f"cannot read the prompts {file}: {error}") from error
    form = isinstance(sets, dict) and all(
        isinstance(texts, list) and texts and all(isinstance(text, str) and text for text in texts)
        for texts in sets.values()
    )
    if not form or not sets:
        raise ConfigError(f'{file} has no prompts: {{"set": ["text", ...], ...}} is the form')
    tokenizer = Tokenizer.load(model_path)
    return [Prompt(name, _encode(tokenizer, text)) for name, texts in sets.items() for text in texts]


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(text)
