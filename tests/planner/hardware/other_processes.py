"""Other work on the machine, as measurements see it."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from moeflow.planner.hardware import calibrate, this_machine


def others_take(monkeypatch: pytest.MonkeyPatch, *shares: float) -> None:
    """Have others take these shares of the processor in the next measurements, the last one from then on."""
    coming = chain(shares, repeat(shares[-1]))

    class Others:
        def __init__(self) -> None:
            self.share = next(coming)

    monkeypatch.setattr(calibrate, "OtherWork", Others)
    monkeypatch.setattr(this_machine, "OtherWork", Others)
