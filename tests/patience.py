"""The one limit on waits for processes and threads: far above their time, so that a busy machine fails no test."""

PATIENCE_S = 120.0
