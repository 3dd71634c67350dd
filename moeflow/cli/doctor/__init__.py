"""`moeflow doctor`."""
