"""What a grammar may cost, wherever it is compiled: no schema may hold up others for long, or fill memory."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # some 20 ms
    step_lexer_fuel=200_000,  # of a mask: some 15 ms
    step_max_items=50_000,  # of a mask: some 3 ms
    max_lexer_states=50_000,  # some 100 MB
    max_grammar_size=200_000,  # symbols
    verbose_errors=False,
)

_IN_WORDS: Final = {"NoExtensionBias": "nothing that could follow is part of it"}


def reason_of(error: str) -> str:
    """Return what llguidance says of a grammar, without the place in a text that users have not written."""
    lines = error.strip().splitlines() or ["it is not accepted"]
    _, separator, reason = lines[0].partition(": ")
    first = reason if separator and lines[0].startswith("at ") else _IN_WORDS.get(lines[0], lines[0])
    return " ".join([first, *(line for line in lines[1:] if line.startswith("error: "))])
