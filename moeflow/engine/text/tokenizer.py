"""Text to token ids and back, and conversations to prompts, as the checkpoint's own files define it.

The only file that knows transformers. Loads no torch, so that the process that speaks HTTP starts fast, and
never runs code that a checkpoint brings along: its chat template runs in a process of its own.

Encoding and decoding call the functions for batches also for one text, as only those release the interpreter's lock:
other threads go on while a long text is encoded, which takes about a second for each million characters.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from moeflow.checkpoint.gguf.header import read_gguf_header
from moeflow.checkpoint.json_file import MAX_CONFIG_BYTES
from moeflow.checkpoint.regular_file import read_whole
from moeflow.core.brief import cut
from moeflow.core.errors import ChatTemplateError, CheckpointError, ContextLengthError, RequestError
from moeflow.core.units import MIB
from moeflow.engine.text.chat_template import ChatTemplate
from moeflow.engine.text.gguf_tokenizer import build_tokenizer
from moeflow.engine.text.token_bytes import byte_rule
from moeflow.engine.text.token_length import TokenLength, token_length

_SMALL_FILES = (  # that transformers opens beside tokenizer.json
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "config.json",
)
_MAX_TOKENIZER_BYTES = 64 * MIB  # vocabularies of a quarter of a million tokens take half as much
_MAX_TOKENIZER_VALUES = 4_000_000  # likewise


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
        if not os.path.lexists(file):
            raise CheckpointError(
                "is missing, so text cannot be turned into tokens",
                file=file,
                remedy="Copy it from the original model, or write it with transformers' "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        _check_files(folder)
        try:
            backend = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # tokenizers raises bare exceptions, transformers many kinds
            raise CheckpointError(
                f"cannot be read as a tokenizer: {cut(str(error))}",
                file=file,
                remedy="Download the tokenizer's files again",
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

    def encode(self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Return the tokens of a text; with special tokens as the model expects a prompt to begin.

        Raises: RequestError if the text is no Unicode (a lone surrogate from a JSON escape); ContextLengthError if
        it is so long that it must have more than `max_tokens` tokens.
        """
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}", param="prompt"
            ) from error
        self._check_length(utf8, max_tokens)
        (encoding,) = self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; incomplete characters become U+FFFD."""
        text: str
        (text,) = self._core.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return text

    def _check_length(self, utf8: bytes, max_tokens: int | None) -> None:
        if max_tokens is None or self._token_length is None:
            return
        fewest = self._token_length.fewest_tokens(utf8)
        if fewest > max_tokens:
            raise ContextLengthError(
                f"the prompt has {len(utf8)} bytes, which are at least {fewest} tokens; the context holds "
                f"{max_tokens}. Shorten the prompt, or serve the model with a longer context if it has one",
                param="prompt",
            )

    @functools.cached_property
    def _token_length(self) -> TokenLength | None:
        return token_length(self._core)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for ids that only the model has rows for."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._core.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._byte_rule(token)
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether the model defines how a conversation becomes a prompt."""
        return bool(self._backend.chat_template)

    def warm_up(self) -> None:
        """Do now what the first prompts would wait for: start the process that renders, learn how long tokens are.

        Raises: ChatTemplateError if no process can be started.
        """
        _ = self._token_length
        if self.has_chat_template:
            self._chat_template.warm_up()

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> list[int]:
        """Return the prompt that asks the model for the next message of a conversation.

        A message's content is a string, or a list of {"type": "text", "text": ...} parts, which are joined.

        Raises: RequestError if the model has no template, or it refuses the messages; ContextLengthError if the
        prompt must have more than `max_tokens` tokens; ChatTemplateError if the template is broken, or takes more
        time or memory than it may.
        """
        if not self.has_chat_template:
            raise RequestError(
                "this model has no chat template; use plain completions, or a model that was tuned for chat",
                param="messages",
            )
        conversation = [_plain_message(message, i) for i, message in enumerate(messages)]
        if not conversation:
            raise RequestError("messages is empty", param="messages")
        text = self._chat_template.render(conversation)
        return self.encode(text, add_special_tokens=False, max_tokens=max_tokens)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        try:
            source: str = self._backend.get_chat_template()
        except ValueError as error:  # several templates, none of which is the default
            raise ChatTemplateError(f"the model's chat templates cannot be used: {error}") from None
        return ChatTemplate(source, self._backend.special_tokens_map)


def _check_files(folder: Path) -> None:
    """Raise CheckpointError if one of the files that transformers opens would make it wait, or is far too large."""
    files = [folder / name for name in _SMALL_FILES] + sorted(folder.glob("additional_chat_templates/*"))
    for file in files:
        if os.path.lexists(file):
            read_whole(file, MAX_CONFIG_BYTES)
    file = folder / "tokenizer.json"
    data = read_whole(file, _MAX_TOKENIZER_BYTES)
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > _MAX_TOKENIZER_VALUES:
        raise CheckpointError(
            f"holds more than {_MAX_TOKENIZER_VALUES} values, which no tokenizer does",
            file=file,
            remedy="Download the tokenizer's files again",
        )


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
