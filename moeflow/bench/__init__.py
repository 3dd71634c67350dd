"""The project's one way to make a speed claim: what is measured, against which floor, and how it is written down."""
