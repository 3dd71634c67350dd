"""The processes of one engine that share its model: each computes its part of the same pass."""
