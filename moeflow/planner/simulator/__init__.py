"""The real scheduler, caches and pipelines on a virtual clock."""
