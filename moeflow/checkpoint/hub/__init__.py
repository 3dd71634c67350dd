"""Models by name: what a hub has, what of it is on this machine, and the way from there to here."""
