"""Turns a missing field of a record into an error that names the record and the remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moeflow.bench.records import Record
from moeflow.core.errors import ConfigError


@contextmanager
def readable(records: Sequence[Record]) -> Iterator[None]:
    """Show records of one kind. Raises: ConfigError if another version wrote one in another form."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        field = error.args[0] if isinstance(error, KeyError) else None
        lacking = [record for record in records if json.dumps(field) not in json.dumps(record)] or records
        times = ", ".join(dict.fromkeys(record["time"] for record in lacking))
        cause = "a field has another form" if field is None else f"the field {field!r} is missing"
        raise ConfigError(
            f"the record of {times}, kind {records[0]['kind']!r}, cannot be shown: {cause}. Another version wrote it: "
            "delete its line, or measure again with its command"
        ) from error
