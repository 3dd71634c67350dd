"""Small models that guess for a large one, distilled from its own text, alone or as a pool."""
