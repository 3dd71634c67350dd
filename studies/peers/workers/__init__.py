"""One program an engine, run by the interpreter of that engine's own environment; see `protocol.py`."""
