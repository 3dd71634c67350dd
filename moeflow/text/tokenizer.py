"""Text to token ids and back, and conversations to prompts, as the checkpoint's own files define it.

Does not load torch, so that the HTTP server starts fast. Never runs code of a checkpoint: its chat template runs in a
process of its own.

Encoding and decoding use the batch functions even for one text, because only these release the interpreter's lock. A
long text takes about a second per million characters; other threads run meanwhile.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from moeflow.checkpoint.gguf.file_names import gguf_start
from moeflow.core.errors import CheckpointError, ContextLengthError, RequestError
from moeflow.kernels.on_demand import on_demand
from moeflow.text.chat_template import ChatTemplate
from moeflow.text.chat_template_files import choose_template
from moeflow.text.message_order import MessageOrder
from moeflow.text.past_calls import first_text_call, with_objects, without_texts
from moeflow.text.token_bytes import byte_rule
from moeflow.text.token_length import TokenLength, token_length
from moeflow.text.tokenizer_files import TokenizerParts, read_folder, read_gguf, write_folder

if TYPE_CHECKING:
    from moeflow.text.tool_syntax.tool import Tool

with on_demand(__name__):
    from moeflow.text import chat_format  # with all syntaxes of calls

logger = logging.getLogger(__name__)

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `vocab_size` counts its tokens; a model may have rows for more. `special_token_ids` are the tokens that its files
    mark as not part of the text.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._core = parts.core
        self._core.no_truncation()  # some files ask for it, which would cut prompts in silence
        self._core.no_padding()
        decoder = self._core.decoder
        rule = byte_rule(None if decoder is None else decoder.__getstate__())
        if rule is None:
            raise CheckpointError(
                f"the tokenizer's decoder {decoder} is not supported",
                file=parts.source,
                remedy="Supported are byte-level and SentencePiece tokenizers",
            )
        self._byte_rule = rule
        self._message_order = MessageOrder()
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = self._core.get_vocab_size(with_added_tokens=True)
        added = self._core.get_added_tokens_decoder()
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load from a Hugging Face folder or a GGUF file, also one in parts.

        Raises: CheckpointError if there is no tokenizer or it is damaged.
        """
        path = gguf_start(Path(path))
        parts = read_gguf(path) if path.suffix == ".gguf" else read_folder(path)
        if parts.notice:
            logger.warning("%s: %s", parts.source, parts.notice)
        return cls(parts)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, tokenizer_config.json and the chat template into a Hugging Face folder."""
        write_folder(self._parts, Path(folder))

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
        if max_tokens is None or len(utf8) <= max_tokens:  # a token stands for one byte at least
            return
        if self._token_length is None:
            return
        fewest = self._token_length.fewest_tokens(utf8)
        if fewest > max_tokens:
            raise ContextLengthError(fewest, max_tokens, is_least=True)

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
        return bool(self._parts.chat_templates)

    @property
    def chat_template(self) -> str:
        """The template for conversations; "" without one. Raises: ChatTemplateError if it is not known which one."""
        return choose_template(self._parts.chat_templates) if self.has_chat_template else ""

    def warm_up(self) -> None:
        """Do now what the first prompts would wait for: start the process that renders, learn how long tokens are.

        Raises: ChatTemplateError if no process can be started.
        """
        _ = self._token_length
        if self.has_chat_template:
            self._chat_template.warm_up()

    def close(self) -> None:
        """End the processes that render; later prompts start new ones."""
        if self.has_chat_template:
            self._chat_template.close()

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None, continues_last: bool = False
    ) -> list[int]:
        """Return the tokens of `chat_prompt` without tools."""
        return self.chat_prompt(messages, max_tokens=max_tokens, continues_last=continues_last).token_ids

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        *,
        max_tokens: int | None = None,
        continues_last: bool = False,
    ) -> ChatPrompt:
        """Return the prompt that asks the model for the next message of a conversation.

        With `continues_last` it asks for the rest of the last message, and ends with the content of that.

        A message's content is a string, or a list of {"type": "text", "text": ...} parts, which are joined.
        `variables` are for the template to use. `MessageOrder` rearranges messages that the template does not take.

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
        known, described = self.chat_format.conversation(conversation, [tool.as_json() for tool in tools])
        known = self._message_order.arranged(
            known,
            lambda marked: self._chat_template.render(marked, described[:1], variables),
            has_variables=bool(variables),
        )
        text = self._rendered(messages, known, described, variables, continues_last=continues_last)
        token_ids = self.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        return ChatPrompt(token_ids, not continues_last and self.chat_format.ends_in_reasoning(text))

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        known: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continues_last: bool,
    ) -> str:
        """Return the prompt of messages, `known` as the template takes them. Raises: see `ChatTemplate.render`."""
        render = partial(self._chat_template.render, tools=tools, variables=variables, continues_last=continues_last)
        try:
            return render(known)
        except RequestError as error:
            found = first_text_call(messages)
            if found is None:
                raise
            render(without_texts(known))  # raises any other cause
            raise RequestError(
                f"{found.place}: {found.description}, and the model's chat template takes only an object ({error}). "
                "Send an object, such as {}, or leave out the call and its result",
                param=found.place,
            ) from None

    @functools.cached_property
    def chat_format(self) -> chat_format.ChatFormat:
        """How tools are described to the model, its calls, and its reasoning."""
        return chat_format.ChatFormat(self.chat_template)

    def added_id(self, text: str) -> int | None:
        """Return the token that was added to the vocabulary for a text, if there is one."""
        return self._added_ids.get(text)

    @functools.cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self._core.get_added_tokens_decoder().items()}

    @property
    def marker_ids(self) -> frozenset[int]:
        """Tokens that set calls of tools and reasoning apart."""
        found = map(self.added_id, self.chat_format.all_markers)
        return frozenset(token_id for token_id in found if token_id is not None)

    def special_ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Return those special tokens that are one of these texts."""
        found = map(self.added_id, texts)
        return self.special_token_ids.intersection(token_id for token_id in found if token_id is not None)

    @functools.cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self.chat_template, self._parts.special.texts)


class ChatPrompt(NamedTuple):
    """What asks the model for the next message of a conversation."""

    token_ids: list[int]
    is_reasoning: bool  # its end has begun the model's reasoning


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
    return with_objects({**message, "content": content})


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
