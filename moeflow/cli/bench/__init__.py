"""`moeflow bench`, one file a measurement."""
