"""The project's one way to make a speed claim: the measurement, its lower bound, and its record."""
