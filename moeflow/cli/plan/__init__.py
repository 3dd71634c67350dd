"""`moeflow plan` and --plan."""
