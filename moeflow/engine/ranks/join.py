"""Be a rank of an engine on another machine: join it, load, compute passes until it ends, and wait for the next.

What another try cannot help ends this: a token, version or checkpoint that is not the first rank's. All else is waited
out: an engine that is not there yet or no more, a network that is cut, ranks that have all joined.
"""

from __future__ import annotations

import dataclasses
import gc
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from moeflow.checkpoint.identity import fingerprint_of
from moeflow.checkpoint.open import open_checkpoint
from moeflow.checkpoint.packed.reader import OnBytes
from moeflow.core.address import format_address
from moeflow.core.engine_config import EngineConfig
from moeflow.core.errors import CheckpointError, ConfigError, GroupError, MoeflowError
from moeflow.core.first_signal import on_first_signal
from moeflow.engine.ranks.computing import compute_passes
from moeflow.engine.ranks.joining import (
    MEETING_S,
    PASS,
    Assignment,
    Candidacy,
    Invitation,
    hear,
    own_application,
    say,
)
from moeflow.engine.ranks.loading_signs import LoadingSigns
from moeflow.engine.ranks.own_model import bring_own_model, find_own_model, in_tenths
from moeflow.kernels.cpu import extension
from moeflow.models.packing import slab_spec
from moeflow.parallel.tcp.conversation import Refusal, RefusedError
from moeflow.parallel.tcp.endpoint import Endpoint, local_host_of
from moeflow.parallel.tcp.link import Link
from moeflow.parallel.tcp.mesh import Meeting, meet
from moeflow.parallel.tcp.tcp_group import TcpGroup
from moeflow.planner.choices.packed_files import (
    ensure_packed_weights_file,
    find_packed_weights_file,
    formats_of,
    place_of_packed_weights,
)
from moeflow.planner.choices.prompt_cache_choice import default_prompt_folder
from moeflow.planner.hardware.host import host_resources

_FIRST_PAUSE_S: Final = 0.5
_MAX_PAUSE_S: Final = 8.0  # between tries, each pause twice as long as the one before


class LeftError(MoeflowError):
    """A signal has ended the part of this machine."""


OnNews = Callable[[str], None]
Computing = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What the user of a machine that joins has set."""

    host: str  # of the first rank
    port: int
    token: bytes
    model: str | None = None  # None: the server's, see `own_model.py`
    num_threads: int | None = None  # None: one a core
    cpu_isa: str = ""  # the best instruction set to use; empty: the best there is
    cache_dir: Path | None = None  # where packed weights may be
    group: str = ""  # the ranks of an engine are of one group


def join(settings: JoinSettings, on_news: OnNews, computing: Computing = nullcontext) -> NoReturn:
    """Be a rank of one engine after the other, for ever; `on_news` gets what changes, in words.

    `computing` is entered as long as an engine needs this process.

    Raises: ConfigError, CheckpointError, CapacityError for what another try would not change; LeftError after the
    first signal.
    """
    with on_first_signal(_leave):
        _join(settings, on_news, computing)
    raise AssertionError


def _leave() -> NoReturn:
    raise LeftError("this machine has left")


def _join(settings: JoinSettings, on_news: OnNews, computing: Computing) -> NoReturn:
    if not extension.is_available():
        raise ConfigError(f"a rank needs the CPU extension: {extension.why_not()}")
    pause_s, last_news = _FIRST_PAUSE_S, ""
    while True:
        try:
            with Membership(settings) as membership:
                pause_s, last_news = _FIRST_PAUSE_S, ""
                membership.serve(on_news, computing)
        except _NotHereError as missing:
            bring_own_model(missing.server_path, settings.cache_dir, in_tenths(on_news))
            continue
        except RefusedError as error:
            if not error.may_retry:
                where = format_address(settings.host, settings.port)
                raise ConfigError(f"{where} refuses this process: {error}") from None
            news = str(error)
        except GroupError as error:
            news = str(error)
        if news != last_news:
            on_news(f"{news}; waiting to join again")
            last_news = news
        gc.collect()  # the model goes before there is another
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


class _NotHereError(Exception):
    """The model has to be brought here first. That may take longer than the first rank listens."""

    def __init__(self, server_path: str) -> None:
        self.server_path = server_path


class Membership:
    """One engine that takes this process as a rank. A context manager, which ends it."""

    def __init__(self, settings: JoinSettings) -> None:
        """Apply. Raises: GroupError, RefusedError, ConfigError; CheckpointError if the model is not there."""
        self._settings = settings
        self._num_threads = settings.num_threads or host_resources().num_cores
        self._arrivals: queue.Queue[Link] = queue.Queue()  # of ranks that connect to this one
        with ExitStack() as undo:
            self._endpoint = undo.enter_context(closing(Endpoint(settings.token)))
            link = self._link = self._endpoint.connect(settings.host, settings.port)
            port = self._endpoint.listen(local_host_of(link), 0, self._arrivals.put)
            say(link, own_application(self._num_threads, settings.cpu_isa, host_resources().available_bytes))
            invitation = hear(link, Invitation)
            self._model_path = settings.model or self._find(invitation.model_path)
            say(link, Candidacy(self._fingerprint(), port))
            self._undo = undo.pop_all()

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def serve(self, on_news: OnNews, computing: Computing) -> None:
        """Compute passes. Raises: GroupError when the engine ends; as loading a model."""
        on_news(f"waiting at {self._link.address} until all ranks are there")
        task = hear(self._link, Assignment, timeout_s=None)
        with computing():
            self._compute(task, on_news)

    def _compute(self, task: Assignment, on_news: OnNews) -> None:
        link = self._link
        meeting = Meeting(task.group_id, task.rank)
        links = meet(meeting, task.addresses, self._endpoint, {0: link}, self._arrivals, MEETING_S)
        on_news(f"rank {task.rank} of {len(task.addresses)}: loading {self._model_path}")

        signs = LoadingSigns(link)

        def on_loaded() -> None:
            signs.end()
            on_news("ready")

        with closing(TcpGroup(task.rank, links, task.timeout_s)) as group:
            try:
                config = own_config(task.config, self._model_path, self._settings)
                compute_passes(config, group, self._passes(), on_loaded, signs.note_progress)
            except BaseException as error:
                group.abort(str(error) if isinstance(error, MoeflowError) else f"{type(error).__name__} {error}")
                raise

    def _find(self, server_path: str) -> str:
        """Return where the model is on this machine. Raises: _NotHereError."""
        found = find_own_model(server_path, self._settings.cache_dir)
        if found is None:
            say(self._link, Refusal("it gets the model first"))
            raise _NotHereError(server_path)
        return found

    def _fingerprint(self) -> str:
        """Return that of the checkpoint here. Raises: CheckpointError, after telling it the first rank."""
        try:
            return fingerprint_of(self._model_path)
        except CheckpointError as error:
            say(self._link, Refusal(str(error)))
            raise

    def _passes(self) -> Iterator[bytes]:
        while True:
            yield self._link.receive_message(PASS, timeout_s=None)


def own_config(
    config: EngineConfig, model: str, settings: JoinSettings, on_packed: OnBytes | None = None
) -> EngineConfig:
    """Return the other machine's configuration with this one's paths and threads, and this one's path of the model.

    Packed weights in the cache folder are used. With `on_packed`, and if the server's are packed, they are made.
    Raises: CheckpointError; as `pack_model`.
    """
    own = dataclasses.replace(
        config,
        model_path=model,
        packed_file="",
        num_threads=settings.num_threads or host_resources().num_cores,
    )
    with closing(open_checkpoint(model)) as checkpoint:
        spec = slab_spec(checkpoint, formats_of(config))
        packed = find_packed_weights_file(checkpoint, spec, None, settings.cache_dir)
        if packed is None and config.packed_file and on_packed is not None:
            place = place_of_packed_weights(checkpoint, spec, None, settings.cache_dir)
            packed = ensure_packed_weights_file(checkpoint, place, own, on_packed).path
        if config.experts is not None:  # the engine packs them if they are not there
            place = place_of_packed_weights(checkpoint, spec, None, settings.cache_dir)
            own = dataclasses.replace(own, experts=dataclasses.replace(config.experts, packed_weights_file=str(place)))
    if config.prompt_cache is not None and not Path(config.prompt_cache.folder).is_dir():
        folder = str(default_prompt_folder(settings.cache_dir).absolute())
        own = dataclasses.replace(own, prompt_cache=msgspec.structs.replace(config.prompt_cache, folder=folder))
    return own if packed is None else dataclasses.replace(own, packed_file=str(packed))
