"""A GPU in software: whole models run on it, and it counts what would slow a real one."""
