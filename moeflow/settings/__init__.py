"""Engine settings: values, their options of the command line, and their names and types in Python."""
