"""Results as a table, as JSON lines and as JUnit's XML."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree

from rich import box
from rich.markup import escape
from rich.table import Table

from moeflow.cli.check.outcome import Result

_COLORS = {"ok": "green", "FAILED": "bold red", "warning": "yellow", "absent": "dim", "skipped": "dim"}


def table(results: Sequence[Result]) -> Table:
    """Return a row for each check, and one for each area that the server lacks."""
    grid = Table(box=box.SIMPLE_HEAD)
    for name in ("area", "check", "result"):
        grid.add_column(name, no_wrap=True)
    grid.add_column("seconds", justify="right")
    grid.add_column("reason", overflow="fold")
    for area in dict.fromkeys(result.area for result in results):
        rows = [result for result in results if result.area == area]
        if len({(row.status, row.reason) for row in rows}) == 1 and rows[0].reason and len(rows) > 1:
            grid.add_row(area, f"all {len(rows)}", _colored(rows[0].status), "", escape(rows[0].reason))
            continue
        for row in rows:
            seconds = f"{row.seconds:.1f}" if row.seconds else ""
            grid.add_row(area, row.check, _colored(row.status), seconds, escape(row.reason))
    return grid


def _colored(status: str) -> str:
    return f"[{_COLORS[status]}]{status}[/]"


def summary(results: Sequence[Result]) -> str:
    """Return one line with the number of each result."""
    counts: Counter[str] = Counter(result.status for result in results)
    seconds = sum(result.seconds for result in results)
    named = ", ".join(f"{counts[status]} {status}" for status in _COLORS if counts[status])
    return f"{len(results)} checks in {seconds:.1f} s: {named}"


def junit(results: Sequence[Result]) -> bytes:
    """Return a test suite for each area. Absent and skipped checks, and warnings, are skipped tests."""
    root = ElementTree.Element("testsuites", _counts(results))
    for area in dict.fromkeys(result.area for result in results):
        rows = [result for result in results if result.area == area]
        suite = ElementTree.SubElement(root, "testsuite", {"name": area, **_counts(rows)})
        for row in rows:
            fields = {"classname": f"moeflow.check.{area}", "name": row.check, "time": f"{row.seconds:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", fields)
            if row.status == "FAILED":
                failure = ElementTree.SubElement(case, "failure", {"message": _printable(row.reason)})
                failure.text = _printable(f"{row.description}\n{row.source}\n{row.curl}")
            elif row.status != "ok":
                ElementTree.SubElement(case, "skipped", {"message": _printable(f"{row.status}: {row.reason}")})
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True))


def _counts(results: Sequence[Result]) -> dict[str, str]:
    skipped = sum(result.status not in ("ok", "FAILED") for result in results)
    failures = sum(result.status == "FAILED" for result in results)
    seconds = sum(result.seconds for result in results)
    return {
        "tests": str(len(results)),
        "failures": str(failures),
        "errors": "0",
        "skipped": str(skipped),
        "time": f"{seconds:.3f}",
    }


def _printable(text: str) -> str:
    """Return a text without the characters that XML forbids."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "\ufffd" for sign in text)
