"""Runs streams of tasks: futures, lanes, the executor; traces of what ran."""
