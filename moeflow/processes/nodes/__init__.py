"""Engines on other machines: a server's places for them, and the process on such a machine that keeps one."""
