"""Whether passes of a size are faster with lenders, by the clock: what layers take tells too little of whole passes.

Where all experts stream from disk, layers are read ahead while others compute, and a layer that gives a part of its
experts away may cost its successors more than it saves. So either way is tried, and from then on the faster one is
taken, but for a pass now and then in which the other is tried again. Knows no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_RETRY: Final = 32  # passes of a size, of which the slower way gets one
_KEEP: Final = 0.7  # weight of what passes took before


@dataclass(slots=True)
class _Size:
    """What is known of passes of about so many tokens."""

    token_s: dict[bool, float] = field(default_factory=dict)  # seconds a token with lenders, and without
    num_passes: int = 0


class PassTrial:
    """Decides at the first layer of each pass that could use lenders."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._current: tuple[_Size, int, bool] | None = None

    def begin(self, num_tokens: int) -> bool:
        """Return whether a pass uses lenders."""
        size = self._sizes.setdefault(num_tokens.bit_length(), _Size())
        size.num_passes += 1
        is_used = self._choose(size)
        self._current = size, num_tokens, is_used
        return is_used

    def end(self, seconds: float) -> None:
        """Receive what the pass took that was begun last; nothing if none was."""
        if self._current is None:
            return
        (size, num_tokens, is_used), self._current = self._current, None
        token_s = seconds / num_tokens
        size.token_s[is_used] = _KEEP * size.token_s.get(is_used, token_s) + (1 - _KEEP) * token_s

    def forget(self) -> None:
        """What lenders bring is not known any more; a pass that is under way does not count."""
        self._current = None
        for size in self._sizes.values():
            size.token_s.pop(True, None)

    def _choose(self, size: _Size) -> bool:
        for is_used in (True, False):
            if is_used not in size.token_s:
                return is_used
        faster = size.token_s[True] < size.token_s[False]
        return faster if size.num_passes % _RETRY else not faster
