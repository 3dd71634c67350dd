"""Results of a prompt alone: vectors and classes."""
