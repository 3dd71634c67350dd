"""Keywords of JSON Schema whose values are neither a schema nor a list of schemas."""

from __future__ import annotations

from typing import Final

NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
LITERALS: Final = ("const", "enum", "required")  # JSON that an answer repeats
NOTES: Final = ("default", "examples")  # JSON that means nothing
JSON_VALUES: Final = LITERALS + NOTES
