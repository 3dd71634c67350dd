"""Keys and values of prefixes on disk: what blocks are called there, files of them, and a folder within a budget."""
