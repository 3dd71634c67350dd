"""Programs that the study starts."""
