"""Batch jobs: files of requests that are answered with batch priority, by the shell or behind `/v1/batches`."""
