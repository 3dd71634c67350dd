"""Engine settings: one class a topic, each field with its option of the command line."""
