"""Expert parallelism without barriers: predicted, and measured in processes."""
