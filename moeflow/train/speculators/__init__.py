"""Draft models, distilled from a large model's own text, alone or as a pool."""
