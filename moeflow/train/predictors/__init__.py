"""Predictors of experts, distilled from a model's routers (SiDA)."""
