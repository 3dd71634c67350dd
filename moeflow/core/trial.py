"""Whether X makes passes faster: measured in windows of passes with and without X, decided, and rarely tried again.

A trial starts with X off and saves `SHARE` of the time of each pass. A pass with X is tried once the saved time covers
its risk: an upper bound of its loss, from the gains so far. So an X that loses costs at most about `SHARE` of all time.
An X that gains soon carries no risk; then windows with and without X alternate until the difference is certain.

A decision against X stands for `FIRST_REST` passes, and twice as long after each trial that confirms it. A decision for
X stands for `FIRST_STAND` passes, and twice as long after each check. Gains are shares of the time of a pass without X.
No clock is read here.
"""

from __future__ import annotations

import logging
import math
from typing import ClassVar, Final

from moeflow.core.running_fit import RunningCurve

logger = logging.getLogger(__name__)

NOT_TRIED: Final = "not tried yet"
SHARE: Final = 0.005  # of the time of passes: the mean cost of a trial. A request of 17 tokens or more loses below 1%
WINDOW: Final = 4  # passes in a row with X, or without
MIN_GAIN: Final = 0.01  # a smaller gain is not worth the work that X does
FIRST_REST: Final = 512  # passes
LONGEST_REST: Final = 16384
FIRST_STAND: Final = 64  # passes after which a decision for X is checked
STAND: Final = 512  # ... at most
MOST_WAITED: Final = 0.55  # of the time of passes without X: an X that hides waits never gained above this share
MOST_RISK: Final = 0.3  # of a pass; a trial that risks more ends
_MAX_TRIED: Final = 2048  # passes with X, after which an open trial ends
_CERTAIN: Final = 4.0  # standard errors that a decision for X needs, because it is asked after each pass
_REJECTED: Final = 3.0  # ... and a decision against X, or a check of a decision for X,
_CONFIRMED: Final = 1.0  # ... and a check with `_CHECK` passes of each kind
_CHECK: Final = 32
_LEAST_EXACT: Final = 16  # exact gains before a decision, because they may differ much; they pay for losses until then
_NOISE: Final = 0.2  # standard deviation of a gain: an assumption that weighs as `_ASSUMED` passes without gain
_NOISE_PASSES: Final = 128  # memory of the noise in passes without X
_ASSUMED: Final = 8
_RISK_ERRORS: Final = 2.26  # so that a first try risks 0.16 of a pass, the worst recorded loss
_MOST_LOSS: Final = 1.0  # of a pass that counts: a slower one was disturbed
_MOST_CREDIT: Final = 16.0  # passes that an X may lose after it has gained as many
_FEW: Final = 16  # tokens
_WEIGHT: Final = 0.2  # of the newest pass without X in the expected time of one


class GainTrial:
    """Decides from the gains of passes with X."""

    _is_exact: ClassVar[bool] = True  # so gains pay for the next tries, and need no passes without X

    def __init__(self, name: str, *, starts_on: bool = False) -> None:
        """`name` is for messages.

        Use `starts_on` for a part of another X, whose own trial bounds the losses: its windows alternate at once.
        """
        self.name = name
        self.is_on = False  # in the next pass
        self.verdict: bool | None = None  # of the last trial
        self._starts_on = starts_on
        self._next_rest = FIRST_REST
        self._begin()

    @property
    def gain(self) -> float:
        """Return the mean gain of the tried passes."""
        return self._sum / max(self._num_on, 1)

    @property
    def reason(self) -> str:
        """Why X is on or off, in words."""
        if not self._num_on:
            return NOT_TRIED
        text = f"passes take {abs(self.gain):.0%} {'less' if self.gain > 0 else 'more'} time with it"
        return text if self._has_decided else f"in trial: {text}, {self._num_on} passes tried"

    def note(self, gain: float | None) -> None:
        """Count a pass with its gain, or a pass without X."""
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._begin()
        elif self._has_decided:
            self._follow(gain)
        else:
            self._try(gain)

    def _begin(self) -> None:
        self.is_on = self._is_free = bool(self.verdict) or self._starts_on  # whether tries need no credit
        self._has_decided, self._rest, self._in_window, self._credit = False, 0, 0, 0.0
        self._num_on = self._num_off = 0
        self._sum = self._squares = 0.0  # of gains

    def _try(self, gain: float | None) -> None:
        self._in_window += 1
        if gain is None:
            self._num_off += 1
            self._credit = max(self._credit, min(self._credit + SHARE, self._risk))
        else:
            self._num_on += 1
            earned = gain if self._is_exact else -self._risk
            self._credit = min(self._credit + SHARE + earned, _MOST_CREDIT)
            bounded = max(gain, -_MOST_LOSS)  # one disturbed pass must not decide
            self._sum += bounded
            self._squares += bounded * bounded
        found = self._found()
        if found is not None:
            self._settle(found)
            return
        is_on = self._is_exact or self.is_on is (self._in_window < WINDOW)
        is_on = is_on and (self._is_free or self._credit >= self._risk)
        if is_on is not self.is_on:
            self.is_on, self._in_window = is_on, 0

    def _follow(self, gain: float | None) -> None:
        """Watch an X that is on; it ends once it has lost its gains."""
        self._credit = min(self._credit + SHARE + (gain or 0.0), _MOST_CREDIT)
        if self._credit < 0:
            self._settle(False)

    def _found(self) -> bool | None:
        """Return the decision; None while the difference is uncertain."""
        fewer = min(self._num_on, self._num_off)
        if fewer < (_LEAST_EXACT if self._is_exact else WINDOW if self._is_free else 2):
            return None
        number = self._num_on if self._is_exact else 1 / (1 / self._num_on + 1 / self._num_off)
        error = math.sqrt(self._variance / number)
        errors = _CERTAIN if not self.verdict else _CONFIRMED if fewer >= _CHECK else _REJECTED
        if fewer >= WINDOW and self.gain > max(MIN_GAIN, errors * error):
            return True
        is_risky = not self._is_free and self._risk > MOST_RISK
        if is_risky or self.gain + _REJECTED * error < MIN_GAIN or self._num_on >= _MAX_TRIED:
            return False
        return None

    def _settle(self, verdict: bool) -> None:
        is_new, self.verdict, self.is_on = verdict is not self.verdict, verdict, verdict
        self._has_decided = True
        if not verdict:
            self._rest = self._next_rest = FIRST_REST if is_new else min(2 * self._next_rest, LONGEST_REST)
        if is_new:
            logger.info("%s: switched %s, %s", self.name, "on" if verdict else "off", self.reason)

    @property
    def _variance(self) -> float:
        squares = max(self._squares - self._sum**2 / max(self._num_on, 1), 0.0)
        return (_ASSUMED * _NOISE**2 + squares) / (_ASSUMED + max(self._num_on - 1, 0))

    @property
    def _risk(self) -> float:
        """Return an upper bound of the loss of the next pass with X, as a share of a pass.

        Noise makes gains count less, but losses count in full.
        """
        variance = self._variance
        precision = _ASSUMED / _NOISE**2 + self._num_on / variance
        expected = min(self._sum / (_ASSUMED + self._num_on), self._sum / variance / precision)
        return max(_RISK_ERRORS / math.sqrt(precision) - expected, 0.0)


class Trial(GainTrial):
    """A trial by the times of passes, each compared with passes without X of about the same size."""

    _is_exact = False

    def __init__(self, name: str, *, starts_on: bool = False) -> None:
        self._usual = RunningCurve(_WEIGHT, cell=_cell)  # passes without X
        self._waited = 0.0  # share of their time
        self._noise, self._num_noise = _NOISE**2, _ASSUMED  # mean square of their gains, which would be 0 without noise
        self._next_stand, self._stands = FIRST_STAND, 0  # passes until the next check, and since the decision for X
        super().__init__(name, starts_on=starts_on)

    @property
    def reason(self) -> str:
        """See `GainTrial`."""
        return f"passes wait for {self._waited:.0%} of their time" if self._is_hopeless else super().reason

    def end_pass(self, size: int, seconds: float, waited_s: float = 0.0) -> None:
        """Count a pass of `size` tokens; `waited_s` is its wait for the device that X uses in advance.

        A device that is busy all the time leaves X nothing to gain, so X is not tried there.
        """
        gain = 1 - seconds / max(self._usual.expect(size), 1e-9) if self._usual.has_seen(size) else None
        if not self.is_on:
            self._note_noise(gain)
            self._usual.note(size, seconds)
            self._waited += _WEIGHT * (waited_s / max(seconds, waited_s, 1e-9) - self._waited)
            if self._is_hopeless:
                self.verdict = None
            else:
                self.note(None)
        elif self._has_decided:
            self._stands += 1
            if self._stands == self._next_stand:
                self._begin()
                self._next_stand, self._stands, self.is_on = min(2 * self._next_stand, STAND), 0, False
        elif gain is not None:
            self.note(gain)
        else:
            self.is_on = False  # a pass without X comes first

    def _settle(self, verdict: bool) -> None:
        if verdict is not self.verdict:
            self._next_stand = FIRST_STAND
        super()._settle(verdict)

    def _note_noise(self, gain: float | None) -> None:
        """Learn the noise of a comparison from a pass without X. Few passes with X do not show it."""
        if gain is not None:
            self._num_noise = min(self._num_noise + 1, _NOISE_PASSES)
            self._noise += (min(gain * gain, _MOST_LOSS) - self._noise) / self._num_noise

    @property
    def _variance(self) -> float:
        return max(super()._variance, self._noise)

    @property
    def _is_hopeless(self) -> bool:
        return self._waited > MOST_WAITED and not self.is_on


def _cell(size: int) -> int:
    """Return the same number for sizes that are compared: few tokens exactly, many by octaves."""
    return size if size <= _FEW else _FEW + size.bit_length()
