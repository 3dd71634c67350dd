"""A small model to simulate."""

from tests.small_mixtral_config import model

__all__ = ["model"]
