"""Common parts of all studies: the command line, arms in turns, records and their tables."""
