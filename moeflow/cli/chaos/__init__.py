"""`moeflow chaos`: faults in a test deployment, and a check of all answers."""
