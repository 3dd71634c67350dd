"""The folder that outlives a server: uploaded files, jobs, and the lock that keeps a second server out of it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
from collections.abc import Iterator
from pathlib import Path

from fastapi import Request

from moeflow.core.errors import ConfigError
from moeflow.server.errors import ApiError
from moeflow.server.jobs.batch_store import BatchStore
from moeflow.server.jobs.file_store import FileStore
from moeflow.server.jobs.job_clock import JobClock
from moeflow.server.jobs.worker import BatchWorker
from moeflow.server.service import Service

logger = logging.getLogger(__name__)


class Jobs:
    """Files, batches and who works on them. Close it in the end."""

    def __init__(self, folder: Path, service: Service, clock: JobClock | None = None) -> None:
        """Open or make a data folder. Raises: ConfigError if another server uses it or it cannot be used."""
        clock = clock or JobClock()
        try:
            make_private(folder)
            self._lock = (folder / "lock").open("wb")
        except OSError as error:
            raise ConfigError(f"data folder {folder}: {error.strerror}; name another with --data-dir") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.batches = BatchStore(folder / "batches", clock)
            self.files = FileStore(
                folder / "files",
                clock,
                is_needed=self.batches.needs,
                result_bytes=self.batches.result_bytes,
                quota_bytes=service.config.file_quota_bytes,
            )
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(f"another server uses the data folder {folder}; name another with --data-dir") from None
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"data folder {folder} cannot be used: {error}; name another with --data-dir") from None
        self.worker = BatchWorker(service, self.batches, self.files)
        self.worker.finish_settled()

    async def close(self) -> None:
        """Leave the running job where it is, and the folder to others."""
        await self.worker.stop()
        self._lock.close()


def get_jobs(request: Request) -> Jobs:
    """Return the jobs of the application that got this request; for FastAPI's `Depends`.

    Raises: ApiError 503 if it has no data folder.
    """
    jobs: Jobs | None = request.app.state.jobs
    if jobs is None:
        message = "This server keeps no files: it has no data folder, or cannot use it; its log has the reason"
        raise ApiError(503, "no_data_folder", message)
    return jobs


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Make a refusal of what the disk does not take. Raises: ApiError 507."""
    try:
        yield
    except OSError as error:
        logger.warning("the data folder takes nothing: %s", error)
        message = f"The server cannot write to its data folder: {error.strerror}; make room there, then try again"
        raise ApiError(507, "insufficient_storage", message) from None


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for this user only; one that is there stays as it is.

    Raises: OSError.
    """
    if not folder.parent.exists():
        make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
