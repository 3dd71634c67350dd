"""How models write calls of tools: one file per syntax, which parses text incrementally."""
