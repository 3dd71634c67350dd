"""Devices with less memory than the model takes, real and emulated, and what crosses the link to them."""
