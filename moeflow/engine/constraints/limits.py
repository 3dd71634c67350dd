"""The limits of a grammar, the same wherever it is compiled: none may hold up other requests, or fill memory."""

from __future__ import annotations

import re
from typing import Final

from llguidance import LLParserLimits

from moeflow.text.answer_form.lark import PART

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,  # alternatives at one place of an answer
    initial_lexer_fuel=300_000,  # of compiling: about 0.4 s and 60 MB
    step_lexer_fuel=200_000,  # of a mask: about 15 ms
    step_max_items=20_000,  # of a mask: about 20 ms, or 150 where many of them stand at one place
    max_lexer_states=50_000,  # some 100 MB
    max_grammar_size=200_000,  # symbols
    verbose_errors=False,
)
CHECK_CPU_S: Final = 1.0  # of a grammar, before an engine gets it: a client waits for the refusal
MASK_CPU_S: Final = 0.5  # of one mask; the limits above stop nearly all earlier
TOO_SLOW: Final = f"the tokens that may come next take more than {MASK_CPU_S} s of processor time to find: simplify it"

_IN_WORDS: Final = {
    "NoExtensionBias": "nothing can follow, since a rule refers only to itself or a pattern matches no text",
    "lexer error: too many expressions constructed": "its patterns take more steps to follow than are allowed "
    f"({LIMITS.step_lexer_fuel:,} for one token): repeat less, above all where repetitions contain repetitions",
}


_OF_SCHEMAS: Final = "failed to compile JSON schema: "
_SCHEMAS_IN_WORDS: Final = (  # how an error begins, and the same in a user's words
    ("Unimplemented keys: ", "answers cannot be held to these keywords of a schema, leave them out: "),
    ("min/maxProperties only ", "minProperties and maxProperties are only "),
    ("oneOf constraints are ", "a oneOf with schemas that may hold at once is "),
    ("regex parse error:", "a pattern cannot be read:"),
    ("Pointer ", "$ref leads nowhere: pointer "),
    ("Resource ", "$ref leads elsewhere: resource "),
)
_PLACE: Final = re.compile(r"at (\d+)\(\d+\): ")


def reason_of(error: str, grammar: str = "") -> str:
    """Return what llguidance says of a grammar, with the part that it is about, where the grammar names its parts.

    Users have not written the grammar, so its lines mean nothing to them.
    """
    lines = error.replace("<non-verbose/>", "").strip().splitlines() or ["it is not accepted"]
    place = _PLACE.match(lines[0])
    reason = _IN_WORDS.get(lines[0], lines[0]) if place is None else lines[0][place.end() :]
    if reason.startswith(_OF_SCHEMAS):
        reason = _schema_reason(reason.removeprefix(_OF_SCHEMAS))
    part = "" if place is None else _part_at(grammar, int(place[1]))
    return " ".join([f"{part}{reason}", *(line for line in lines[1:] if line.startswith("error: "))])


def _schema_reason(reason: str) -> str:
    begin, words = next((pair for pair in _SCHEMAS_IN_WORDS if reason.startswith(pair[0])), ("", ""))
    return words + reason.removeprefix(begin).partition(". Enable ")[0]


def _part_at(grammar: str, line_number: int) -> str:
    lines = grammar.splitlines()
    line = lines[line_number - 1] if line_number <= len(lines) else ""
    _, separator, part = line.rpartition(PART)
    return f"{part}: " if separator and '"' not in part else ""  # a schema's own texts end in quotation marks
