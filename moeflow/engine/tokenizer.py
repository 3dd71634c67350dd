"""Text to token ids and back, and conversations to prompts, as the checkpoint's own files say.

The only file that knows transformers. Loads no torch, so that the process that speaks HTTP starts fast, and
never runs code that a checkpoint brings along.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from moeflow.checkpoint.gguf_header import read_gguf_header
from moeflow.core.errors import CheckpointError, RequestError
from moeflow.engine.gguf_tokenizer import build_tokenizer
from moeflow.engine.token_bytes import byte_rule


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `vocab_size` counts its tokens; a model may have rows for more. `special_token_ids` are those that its files
    mark as no part of the text.
    """

    def __init__(self, backend: PreTrainedTokenizerFast) -> None:
        self._backend = backend
        self._core = backend.backend_tokenizer
        self._core.no_truncation()  # some files ask for it, which would cut prompts in silence
        self._core.no_padding()
        decoder = self._core.decoder
        rule = byte_rule(None if decoder is None else decoder.__getstate__())
        if rule is None:
            raise CheckpointError(
                f"the tokenizer's decoder {decoder} is not supported",
                file=backend.name_or_path,
                remedy="Supported are byte-level and SentencePiece tokenizers",
            )
        self._byte_rule = rule
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = self._core.get_vocab_size(with_added_tokens=True)
        added = self._core.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a Hugging Face folder or a GGUF file.

        Raises: CheckpointError if there is no tokenizer or it is damaged.
        """
        path = Path(path)
        return cls._load_gguf(path) if path.suffix == ".gguf" else cls._load_folder(path)

    @classmethod
    def _load_folder(cls, folder: Path) -> Tokenizer:
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                "is missing, so text cannot be turned into tokens",
                file=file,
                remedy="Copy it from the original model, or write it with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        try:
            backend = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises bare exceptions, transformers many kinds
            raise CheckpointError(
                f"cannot be read as a tokenizer: {error}", file=file, remedy="Download the tokenizer's files again"
            ) from error
        if not backend.chat_template:
            backend.chat_template = _read_chat_template(folder / "chat_template.json")
        return cls(backend)

    @classmethod
    def _load_gguf(cls, file: Path) -> Tokenizer:
        metadata = read_gguf_header(file).metadata
        core, config = build_tokenizer(metadata, file)
        backend = PreTrainedTokenizerFast(
            tokenizer_object=core,
            chat_template=metadata.get("tokenizer.chat_template"),
            name_or_path=str(file),
            **config,
        )
        return cls(backend)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template into a Hugging Face folder."""
        self._backend.save_pretrained(folder)
        file = Path(folder) / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        for key in ("backend", "is_local", "local_files_only", "name_or_path"):  # of this machine, not of the model
            config.pop(key, None)
        config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that older versions know, too
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text; with special tokens as the model expects a prompt to begin.

        Raises: RequestError if the text is no Unicode (a lone surrogate from a JSON escape).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}", param="prompt"
            ) from error
        ids: list[int] = self._core.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; incomplete characters become U+FFFD."""
        text: str = self._core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for ids that only the model has rows for."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._core.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._byte_rule(token)
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation becomes a prompt."""
        return bool(self._backend.chat_template)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt that asks the model for the next message of a conversation.

        A message's content is a string, or a list of {"type": "text", "text": ...} parts, which are joined.

        Raises: RequestError if the model has no template, or it refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; use plain completions, or a model that was tuned for chat",
                param="messages",
            )
        conversation = [_plain_message(message, i) for i, message in enumerate(messages)]
        if not conversation:
            raise RequestError("messages is empty", param="messages")
        try:
            text = self._backend.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it may raise anything
            raise RequestError(f"the model's chat template refuses the messages: {error}", param="messages") from error
        return self.encode(text, add_special_tokens=False)


def _read_chat_template(file: Path) -> str | None:
    """Return the template from the place that transformers 4 wrote it to for some models."""
    try:
        template: str = json.loads(file.read_text(encoding="utf-8"))["chat_template"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"holds no chat template: {error}", file=file, remedy="Download it again, or remove it"
        ) from error
    return template


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has no role", param="messages")
    content = message.get("content")
    if content is None and message["role"] == "assistant":
        content = ""  # how the API writes an answer without text
    if isinstance(content, list):
        content = "".join(_part_text(part, where) for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string or a list of text parts", param="messages")
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"{where}.content has a part of type {kind!r}; this model reads text parts only", param="messages"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.content has a text part without text", param="messages")
    return text
