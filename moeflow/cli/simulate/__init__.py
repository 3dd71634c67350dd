"""`moeflow simulate`, one file a prediction."""
