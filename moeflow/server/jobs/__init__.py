"""Batch jobs: files of requests that are answered in the background, by the shell or behind `/v1/batches`."""
