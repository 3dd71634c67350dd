"""Expert parallelism of several batches with collectives and without, on processes that stand for devices."""
