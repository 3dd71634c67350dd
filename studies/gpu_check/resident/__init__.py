"""Steps about a model that fits on the GPU. Each module has `run`."""
