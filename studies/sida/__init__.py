"""What knowing a text's experts beforehand is worth, as SiDA was measured (2310.18859)."""
