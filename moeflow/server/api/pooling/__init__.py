"""What is made of a prompt alone: vectors and classes."""
