"""The form that an answer must have, as a grammar: JSON of a schema, a pattern, calls of tools."""
