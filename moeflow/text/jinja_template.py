"""A chat template as Hugging Face models carry them: Jinja, in a sandbox, with the names that transformers offers.

Imports jinja2 alone, so that the process that renders is small and starts fast. Tests compare its result with
transformers' `apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_END = "CONTINUEHERE"  # marks the end of a text to continue, so that templates strip no whitespace before it
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field; templates read the first


class JinjaTemplate:
    """A compiled template. Raises: TemplateSyntaxError, and whatever evaluating its constants does."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
        )
        self._template = environment.from_string(source)
        self._variables = dict(variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] = _NO_VARIABLES,
        *,
        continues_last: bool = False,
    ) -> str:
        """Return the prompt that asks for the next message. Raises: anything, as a template is a program.

        `variables` go before the template's own; arguments of calls in messages are objects. With `continues_last`
        the prompt ends with the content of the last message.
        """
        conversation = [_as_templates_expect(message) for message in messages]
        names = {**self._variables, **variables, "tools": [*tools] or None, "documents": None}
        return self._continued(conversation, names) if continues_last else self._asked(conversation, names)

    def _continued(self, conversation: list[dict[str, Any]], names: Mapping[str, Any]) -> str:
        """Return the prompt that ends with the last message's content.

        A text that begins with whitespace is as the model wrote it, so it follows the prompt that the model had.
        A template may strip this whitespace, or write its own there.
        """
        *before, last = conversation
        content: str = last["content"]
        marked = self._rendered([*before, {**last, "content": content + _END}], names, add_generation_prompt=False)
        prompt, mark, _ = marked.rpartition(_END)
        if not mark:
            raise TemplateError("it does not show the end of the last message, so this cannot be continued")
        if before and content[:1].isspace():
            asked = self._asked(before, names)
            if prompt.startswith(asked) and prompt.removeprefix(asked).lstrip() == content.lstrip():
                return asked + content
        return prompt

    def _asked(self, conversation: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> str:
        return self._rendered(conversation, names, add_generation_prompt=True)

    def _rendered(
        self, conversation: Sequence[Mapping[str, Any]], names: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        names = {**names, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=conversation, **names)
        except TypeError:  # some templates, such as DeepSeek's, concatenate arguments as text
            plain = [_with_text_arguments(message) for message in conversation]
            if plain == conversation:
                raise
            return self._template.render(messages=plain, **names)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what training learns from; here it is the text inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes of Python's type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, which takes no names that begin with an underscore."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute that begins with an underscore: {name!r}")


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """Omit null values, and provide a message's reasoning under the names used by templates."""
    plain = {key: value for key, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the arguments of its calls as JSON text."""
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and not isinstance(function.get("arguments"), str):
            call["function"] = {**function, "arguments": _to_json(function.get("arguments"))}
    return {**message, **({"tool_calls": calls} if calls else {})}


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of that name escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
