"""Common parts of all studies: the command line, interleaved arms, records and their tables."""
