"""Which rank has which experts: by index, by load, while serving, and who serves a token."""
