"""Works out advice in a process of its own, of low priority: searches and measurements must not slow an engine.

The order goes to its stdin; JSON comes back.
"""

from __future__ import annotations

import os
import sys

import msgspec

from moeflow.core.errors import MoeflowError
from moeflow.core.plan import plan_from_json
from moeflow.planner.served.advice import Advice, advise

_LOWEST_PRIORITY = 19


class AdviceOrder(msgspec.Struct, frozen=True):
    """What to advise on."""

    plan: str  # JSON of `plan_to_json`
    model: str  # its name in commands; empty: the built-in one


class AdviceReport(msgspec.Struct, frozen=True):
    """The answer."""

    advice: list[Advice] = []
    problem: str = ""  # why there is none; empty: it was worked out


def report(order: AdviceOrder) -> AdviceReport:
    """Carry out an order."""
    try:
        return AdviceReport(advise(plan_from_json(order.plan, "that is served"), order.model))
    except (MoeflowError, OSError) as error:
        return AdviceReport(problem=str(error))


def main() -> None:
    """Carry out the order on stdin."""
    os.nice(_LOWEST_PRIORITY)
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=AdviceOrder)
    sys.stdout.buffer.write(msgspec.json.encode(report(order)) + b"\n")


if __name__ == "__main__":
    main()
