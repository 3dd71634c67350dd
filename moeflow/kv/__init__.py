"""Keys and values of past tokens: which blocks belong to whom, prefixes that are shared, and where blocks lie."""
