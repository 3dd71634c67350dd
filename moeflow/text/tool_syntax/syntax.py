"""A way to write calls, and which of them a chat template asks for: the one registry of these."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from moeflow.text.answer_form.lark import LarkWriter
from moeflow.text.tool_syntax import deepseek, gemma, glm4, harmony, hermes, llama3, mistral, qwen3_coder
from moeflow.text.tool_syntax.reader import Reader, Steps
from moeflow.text.tool_syntax.tool import Tool, Tools
from moeflow.text.tool_syntax.written_call import WrittenCall


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Return what Mistral's templates demand: nine letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How calls stand in an answer."""

    name: str
    signs: tuple[str, ...]  # all in a template with this syntax
    markers: tuple[str, ...]  # that set calls and messages apart; tokens of that name are no text otherwise
    read: Callable[[Reader, Tools], Steps[None]]
    write: Callable[[LarkWriter, Tool], WrittenCall]
    trigger: str  # with which a call, or the list of them, begins
    before: str = ""  # of the list of calls,
    between: str = ""  # of two of them
    after: str = ""  # of the list
    is_single: bool = False  # an answer has no second call
    text_head: str = ""  # of text for the user
    reasoning: tuple[str, str, str] = ("", "", "")  # begin, end, and what follows; of syntaxes that have their own
    example: str = ""  # of a call, for models with templates that write calls without describing tools
    make_id: Callable[[], str] = _long_id

    @property
    def reads_all(self) -> bool:
        """Whether it defines the form of any answer, also without tools."""
        return bool(self.text_head)


_DEEPSEEK_MARKERS: Final = (
    deepseek.CALLS,
    deepseek.END_CALLS,
    deepseek.CALL,
    deepseek.SEPARATOR,
    deepseek.END_CALL,
)
_MISTRAL_MARKERS: Final = (mistral.BEGIN, mistral.CALL_ID, mistral.ARGS)
HERMES: Final = ToolSyntax(
    "hermes",
    (hermes.BEGIN, hermes.END),
    (hermes.BEGIN, hermes.END),
    hermes.read,
    hermes.write,
    trigger=hermes.BEGIN,
    between="\n",
)
SYNTAXES: Final = (  # the first whose signs are there is meant
    ToolSyntax(
        "harmony",
        (harmony.CHANNEL, harmony.MESSAGE),
        (harmony.START, harmony.CHANNEL, harmony.CONSTRAIN, harmony.MESSAGE, *harmony.ENDS),
        harmony.read,
        harmony.write,
        trigger=f"{harmony.CHANNEL}commentary to=",
        is_single=True,
        text_head=f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        reasoning=(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.ENDS[0], f"{harmony.START}assistant"),
    ),
    ToolSyntax(
        "deepseek_v3",
        (deepseek.CALL, deepseek.SEPARATOR, "```json"),
        _DEEPSEEK_MARKERS,
        deepseek.read,
        deepseek.write_fenced,
        trigger=deepseek.CALLS,
        before=deepseek.CALLS,
        between="\n",
        after=deepseek.END_CALLS,
        example=deepseek.EXAMPLE_FENCED,
    ),
    ToolSyntax(
        "deepseek",
        (deepseek.CALL, deepseek.SEPARATOR),
        _DEEPSEEK_MARKERS,
        deepseek.read,
        deepseek.write,
        trigger=deepseek.CALLS,
        before=deepseek.CALLS,
        after=deepseek.END_CALLS,
        example=deepseek.EXAMPLE,
    ),
    ToolSyntax(
        "mistral",
        (mistral.BEGIN, mistral.ARGS),
        _MISTRAL_MARKERS,
        mistral.read,
        mistral.write_named,
        trigger=mistral.BEGIN,
        make_id=_short_id,
    ),
    ToolSyntax(
        "mistral_list",
        (mistral.BEGIN,),
        _MISTRAL_MARKERS,
        mistral.read,
        mistral.write_listed,
        trigger=mistral.BEGIN,
        before=f"{mistral.BEGIN} [",
        between=", ",
        after="]",
        make_id=_short_id,
    ),
    *(
        ToolSyntax(
            name, (one.begin, one.quote), (one.begin, one.end, one.quote), one.read, one.write, trigger=one.begin
        )
        for name, one in (("gemma4", gemma.GEMMA4), ("functiongemma", gemma.FUNCTION_GEMMA))
    ),
    ToolSyntax(
        "glm4",
        (glm4.BEGIN, glm4.KEY, glm4.VALUE),
        (glm4.BEGIN, glm4.END, glm4.KEY, glm4.END_KEY, glm4.VALUE, glm4.END_VALUE),
        glm4.read,
        glm4.write,
        trigger=glm4.BEGIN,
        between="\n",
    ),
    ToolSyntax(
        "qwen3_coder",
        (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER),
        (qwen3_coder.BEGIN, qwen3_coder.END),
        qwen3_coder.read,
        qwen3_coder.write,
        trigger=qwen3_coder.BEGIN,
        between="\n",
    ),
    HERMES,
    *(
        ToolSyntax("llama3", (sign,), (llama3.TAG,), llama3.read, llama3.write, trigger='{"name": "', between="; ")
        for sign in ('{"name": function name, "parameters":', llama3.TAG)
    ),
)


def syntax_of(template: str) -> ToolSyntax | None:
    """Return how a model of this chat template writes calls; None: the template knows of none."""
    if not re.search(r"\b(tools|tool_calls)\b", template):
        return None
    return next((one for one in SYNTAXES if all(sign in template for sign in one.signs)), None)
