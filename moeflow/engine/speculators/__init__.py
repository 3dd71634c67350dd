"""Models that guess tokens: what needs torch of guessing; the rest is in `moeflow/speculation`."""
