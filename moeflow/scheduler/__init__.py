"""WHEN between passes: who takes part in the next one, with how many tokens."""
