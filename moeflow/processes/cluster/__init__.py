"""Ranks and engines on other machines that Ray starts. The only folder that imports Ray."""
