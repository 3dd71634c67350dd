"""Tests of engines on other machines."""
