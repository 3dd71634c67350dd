"""Steps about a model that is larger than the GPU's memory. Each module has `run`."""
