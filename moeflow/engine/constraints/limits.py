"""The limits of a grammar, the same wherever it is compiled: none may hold up other requests, or fill memory."""

from __future__ import annotations

from typing import Final

from llguidance import LLParserLimits

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_000,  # alternatives at one place of an answer
    initial_lexer_fuel=300_000,  # of compiling: about 0.4 s and 60 MB
    step_lexer_fuel=200_000,  # of a mask: some 15 ms
    step_max_items=20_000,  # of a mask: about 20 ms, or 150 where many of them stand at one place
    max_lexer_states=50_000,  # some 100 MB
    max_grammar_size=200_000,  # symbols
    verbose_errors=False,
)
MASK_CPU_S: Final = 0.5  # of one mask; the limits above stop nearly all earlier
TOO_SLOW: Final = f"the tokens that may come next take more than {MASK_CPU_S} s of processor time to find: simplify it"

_IN_WORDS: Final = {
    "NoExtensionBias": "nothing can follow, since a rule refers only to itself or a pattern matches no text",
    "lexer error: too many expressions constructed": "its patterns take more steps to follow than are allowed "
    f"({LIMITS.step_lexer_fuel:,} for one token): repeat less, above all where repetitions contain repetitions",
}


def reason_of(error: str) -> str:
    """Return what llguidance says of a grammar, without the place in a text that users have not written."""
    lines = error.replace("<non-verbose/>", "").strip().splitlines() or ["it is not accepted"]
    _, separator, reason = lines[0].partition(": ")
    first = reason if separator and lines[0].startswith("at ") else _IN_WORDS.get(lines[0], lines[0])
    return " ".join([first, *(line for line in lines[1:] if line.startswith("error: "))])
