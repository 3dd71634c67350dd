"""What an engine sees of its own passes while somebody looks."""
