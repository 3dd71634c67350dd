"""Steps about a model whose experts are on the GPU and on the CPU."""
