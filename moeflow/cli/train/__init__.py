"""`moeflow train`, one file a kind of model."""
