"""Writes docs/reference/fields.md from the table of fields that other APIs and clients send.

python scripts/fields_page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from moeflow.server.api.schema.field_policy import (  # noqa: E402
    Converted,
    FieldParts,
    Ignored,
    Mapped,
    Policy,
    Refused,
    Unset,
)
from moeflow.server.api.schema.field_table import FIELD_TABLE  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "fields.md"
HEAD = """# Fields of other servers

Clients send fields that other servers know. This page lists how moeflow treats each one.
`scripts/fields_page.py` writes it from `moeflow/server/api/schema/field_table.py`.

- **ignored**: any value is accepted, and changes no answer.
- **as ...**: another name or form of our field. Where both are given, our field counts.
- **refused**: the request gets 400 with the reason, since ignoring the field would change the answer.
  Values that ask for nothing are accepted.

Null is accepted for every field. All other fields are unknown. `--unknown-fields refuse`, the default, answers 400
with the nearest known name. `--unknown-fields ignore` answers the request: the header `x-moeflow-left-out` and the
request's log line then name each field that was left out.

The headings are the names of the objects in `/openapi.json`.
"""


def page(table: Mapping[str, Mapping[str, Policy]]) -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(line for name, rows in table.items() for line in _section(name, rows))])


def _section(name: str, rows: Mapping[str, Policy]) -> Iterator[str]:
    yield f"## {name}\n"
    yield "| field | treatment |"
    yield "| --- | --- |"
    for field, policy in rows.items():
        yield from _row(field, policy)
    yield ""


def _row(field: str, policy: Policy) -> Iterator[str]:
    if isinstance(policy, FieldParts):
        for part, row in policy.rows.items():
            yield from _row(f"{field}.{part}", row)
    else:
        yield f"| `{field}` | {_treatment(policy)} |"


def _treatment(policy: Policy) -> str:
    match policy:
        case Ignored():
            return f"ignored: {policy.reason}"
        case Mapped() | Converted():
            return f"as {', '.join(f'`{name}`' for name in policy.to.split(', '))}"
        case Unset():
            return f"{_values(policy.values)}: not set"
        case Refused():
            return f"refused: {policy.reason}" + (f" (accepted: {_values(policy.harmless)})" if policy.harmless else "")
    raise AssertionError(policy)


def _values(values: tuple[object, ...]) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


if __name__ == "__main__":
    PAGE.write_text(page(FIELD_TABLE))
