"""How a session begins: with a core that is spawned, or attached to one that runs, and with a tokenizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeVar

from pagewire.frontend import wiring
from pagewire.frontend.core.core_source import RunningCores
from pagewire.frontend.core.session import Call, Session
from pagewire.frontend.core.stat_loggers import StatLoggerBase
from pagewire.frontend.core.supervisor import Supervisor
from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.requests.inputs import Intake, MediaPlacer
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.sockets import CurveKeys

if TYPE_CHECKING:
    from typing_extensions import Self

    from pagewire.ipc.options.engine_args import EngineArgs

P = ParamSpec("P")
F = TypeVar("F", bound="Face")


def spawn(
    args: EngineArgs, restarts: int = 0, stat_loggers: Mapping[str, StatLoggerBase] | None = None
) -> Session:
    """Spawn a core, wait until it is ready, and load the tokenizer.

    restarts: how many cores may replace one that was lost.
    stat_loggers: loggers of statistics by name, which get the engine's figures until `close`.

    Raises:
        ValueError, TypeError: bad options, or a model that cannot be loaded. ModelNotFoundError: no such model.
        EngineDeadError: the core failed while it started; the text is the cause.
    """
    args.check()
    access = MediaAccess.read(args.allowed_local_media_path, args.allowed_media_domains)
    connect = partial(Supervisor, wiring.SpawnedCores(args, restarts))
    source = wiring.tokenizer_source(args)
    ahead = wiring.tokenizer_ahead(args, source)
    intake = intake_opener(None, 0, access, ahead, **source)
    return Session(connect, intake, args.otlp_traces_endpoint, stat_loggers)


def attach(
    address: str,
    curve: CurveKeys | None = None,
    tokenizer: str | None = None,
    timeout: float | None = 10.0,
    reattach_timeout: float = 0.0,
    peer_uid: int | None = None,
    trust_remote_code: bool = False,
    *,
    name: str = "attached",
    otlp_traces_endpoint: str | None = None,
    allowed_local_media_path: str = "",
    allowed_media_domains: Sequence[str] | None = None,
) -> Session:
    """Attach to a core that runs already.

    address: where it listens. curve: keys, if it encrypts. timeout: seconds to wait for an answer.
    tokenizer: folder or id; None: the core's.
    reattach_timeout: seconds to wait for another core of the same model at the address, should this one be
        lost; open requests go on with it where they were.
    peer_uid: id of the user as whom the core runs, if it is neither this process's user nor root.
    trust_remote_code: run the Python code of the core's tokenizer, if it has any.
    name: name of this frontend in the core's log and metrics.
    otlp_traces_endpoint: URL of an OpenTelemetry collector that gets a span per request.
    allowed_local_media_path, allowed_media_domains: those of `EngineArgs`, for this frontend.

    Raises:
        PermissionError: the core runs as another user, or does not admit this user or key.
        EngineDeadError: no core answers. ProtocolError: it uses another version. ValueError: a bad address.
        If the core fails while it starts: as `spawn`.
    """
    access = MediaAccess.read(allowed_local_media_path, allowed_media_domains)
    source = RunningCores(address, curve, peer_uid, name, timeout, reattach_timeout)
    intake = intake_opener(tokenizer, own_salt(), access, trust_remote_code=trust_remote_code)
    return Session(partial(Supervisor, source), intake, otlp_traces_endpoint)


def own_salt() -> int:
    """A salt of this frontend's own: frontends on one core must not draw the same seeds."""
    return int.from_bytes(os.urandom(7), "little")


def intake_opener(
    name: str | None,
    salt: int,
    media: MediaAccess,
    ahead: Future[Tokenizer] | None = None,
    **source: Any,
) -> Callable[[EngineInfo, Call], Intake]:
    """A function that makes the intake of a session, once the core is reached.

    name: the tokenizer, as of `load_core_tokenizer`. salt: see `Intake`. media: what may be fetched for prompts.
    ahead: loads the tokenizer already (see `spawned_cores.py`). source: further options of `load_tokenizer`.
    """

    def open_intake(info: EngineInfo, call: Call) -> Intake:
        tokenizer = load_core_tokenizer(info, name, source) if ahead is None else ahead.result()
        hub = source.get("token"), source.get("cache_dir")
        return Intake(info, tokenizer, salt, open_placer(info, media, call), hub)

    return open_intake


def open_placer(info: EngineInfo, access: MediaAccess, call: Call) -> MediaPlacer | None:
    """The placer of media in prompts; None if the engine takes none. call: sends a call to the engine."""
    if info.media is None:
        return None
    placer: MediaPlacer = wiring.media_intake(info.media, access, call, info.max_model_len)
    return placer


def load_core_tokenizer(info: EngineInfo, name: str | None, source: dict[str, Any]) -> Tokenizer | None:
    """Load the tokenizer `name`, or the core's; None without a name if the core skips tokenizers.

    source: further options of `load_tokenizer`, which says what it raises.
    """
    if name is None and info.skip_tokenizer_init:
        return None
    revision = None if name else info.tokenizer_revision
    return load_tokenizer(name or info.tokenizer, info.tokenizer_mode, revision=revision, **source)


class Face(Protocol):
    """An object that users hold: `LLM`, `LLMEngine` or `AsyncLLM`."""

    @classmethod
    def _over(cls, session: Session) -> Self:
        """Make one that uses a session."""


class AttachMethod(Generic[P]):
    """A classmethod that calls `attach`, and returns a `Face` over the session that it makes."""

    def __init__(self, attach: Callable[P, Session]) -> None:
        self._attach = attach

    def __get__(self, instance: object, face: type[F]) -> Callable[P, F]:
        @wraps(self._attach)
        def attach(*args: P.args, **kwargs: P.kwargs) -> F:
            return face._over(self._attach(*args, **kwargs))

        return attach
