"""Draft models: the part of speculation that needs torch; the rest is in `moeflow/speculation`."""
