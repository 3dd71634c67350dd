"""`moeflow chat`."""
