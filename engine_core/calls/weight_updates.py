"""Weights that change while requests run: the calls by which workers get others, at the boundary of a step."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import msgspec

from pagewire.engine_core.admission.lobby import Lobby
from pagewire.engine_core.calls.frontend_call import FrontendCall
from pagewire.engine_core.calls.worker_calls import PendingCalls
from pagewire.engine_core.calls.worker_sleep import WorkerSleep
from pagewire.engine_core.clients.clients import Clients
from pagewire.engine_core.clients.requests import EngineRequests
from pagewire.engine_core.schedule.scheduler import Scheduler
from pagewire.engine_core.schedule.sequence import Sequence, WeightsVersion
from pagewire.engine_core.weights.files import OpenWeights, check_tensors, open_below
from pagewire.engine_core.weights.upload import Upload
from pagewire.engine_core.wings.wing import Wing
from pagewire.engine_core.workers.group import Outcome, WorkerGroup
from pagewire.ipc.errors import EngineBusyError, WeightsChangedError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.items import TensorForm, WeightFile

logger = logging.getLogger("pagewire.core")

MAX_PARTS = 64  # updates of different tensors whose files are kept open
KEY_BYTES = 16
CALL = CALLS["update_weights"]


class UpdatedEngine(Protocol):
    """The part of the core that `WeightUpdates` acts on."""

    scheduler: Scheduler
    lobby: Lobby
    requests: EngineRequests
    worker: WorkerGroup
    clients: Clients
    calls: PendingCalls
    sleep: WorkerSleep


@dataclass(slots=True)
class Update:
    """An update that goes on. requests: what becomes of those that run. since: monotonic time of the call.

    waits: it was checked, and waits for requests or steps. loads: the workers read the weights.
    """

    caller: FrontendCall
    weights: OpenWeights
    version: str
    requests: str
    since: float = field(default_factory=time.monotonic)
    waits: bool = False
    loads: bool = False


class WeightUpdates(Wing):
    """Runs the calls of `WeightCalls`: one update at a time, and one upload.

        update_weights -> checked -> requests have ended, or no step is in flight -> load_weights -> a new version

    What the workers are started with changes only once all of them have the new weights. Before that, workers that
    are lost or fail are replaced by some with the old ones, and no request has seen the new.

    folder: below which files are read; None: none is.
    """

    def __init__(self, core: UpdatedEngine, folder: str | None) -> None:
        self._core, self._folder = core, folder
        self._own: Mapping[str, TensorForm] = {}  # what the model has; empty before the workers have said it
        self._update: Update | None = None
        self._upload: Upload | None = None
        self._numbers = count(1)  # of uploads
        self._num_updates = 0
        self._loaded: list[OpenWeights] = []  # with which workers start, the oldest first

    # ------------------------------------------------------------ calls

    def update_weights(
        self, caller: FrontendCall, path: str, upload: int, version: str, requests: str
    ) -> None:
        """Check weights, and have the workers load them; answers their version.

        Raises:
            ValueError, PermissionError, EngineBusyError: as declared.
        """
        current = self._core.scheduler.sequences.weights.name
        self._check_awake()
        if self._update is not None:
            raise EngineBusyError("update_weights: another update is going on")
        if not self._core.worker.address.startswith("ipc://"):
            raise ValueError(
                "update_weights: workers on other machines cannot read what this one has; start the engine anew "
                "with the weights"
            )
        if version and version == current:
            raise ValueError(f"update_weights: {quoted(version)} is the version of the present weights")
        if bool(path) == bool(upload):
            raise ValueError("update_weights: give either a path or the number of an upload")
        names = (str(number) for number in count(self._num_updates + 1))
        name = version or next(name for name in names if name != current)
        weights = OpenWeights(open_below(self._folder, path)) if path else self._take(caller, upload)
        update = self._update = Update(caller, weights, name, requests)

        def known(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                check_tensors(weights.tensors.values(), self._own)
                if len(self._kept(weights)) >= MAX_PARTS:
                    raise ValueError(
                        f"update_weights: the last {MAX_PARTS} updates had different tensors: send all"
                    )
            except Exception as failure:
                return self._end(update, failure)
            self._begin(update)

        self._ask(known)

    def begin_weights(self, caller: FrontendCall, tensors: list[TensorForm]) -> None:
        """Begin an upload; answers its number, unless another frontend sends weights."""

        def known(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                self.tidy()
                if self._upload is not None and self._upload.owner != caller.identity:
                    raise EngineBusyError("begin_weights: another frontend sends weights")
                check_tensors(tensors, self._own)
                self._drop_upload()
                self._upload = Upload(next(self._numbers), caller.identity, tensors)
            except Exception as failure:
                return caller.refuse(failure)
            caller.reply(self._upload.number)

        self._ask(known)

    def send_weights(self, caller: FrontendCall, upload: int, offset: int, data: bytes) -> None:
        """Take a part of an upload; answers how many bytes there are now.

        Raises:
            ValueError: see `Upload.add`. OSError: there is no room; the upload is dropped.
        """
        target = self._upload_of(caller, upload)
        try:
            caller.reply(target.add(offset, data))
        except OSError:
            self._drop_upload()
            raise

    def load_weights(self, caller: FrontendCall, files: list[WeightFile]) -> None:
        """Refuse: workers alone do it, when the core calls them.

        Raises:
            PermissionError: always.
        """
        raise PermissionError("load_weights: the core alone calls it; call update_weights")

    # ------------------------------------------------------------ an update

    def _begin(self, update: Update) -> None:
        """Let new requests wait, and end those that run if they are not to go on."""
        update.waits = True
        core = self._core
        core.lobby.awaits_weights = update.requests == "finish"
        if update.requests == "abort":
            begun = [(sequence.client, sequence.key) for _, sequence in core.requests if has_begun(sequence)]
            ended = set(begun)
            core.requests.fail(
                [sequence for _, sequence in core.requests if (sequence.client, sequence.key) in ended],
                WeightsChangedError("the model gets other weights, and running requests were to be ended"),
            )

    def advance(self) -> None:
        """Have the weights loaded once the requests have ended, or no step is in flight."""
        update, core = self._update, self._core
        if update is None or not update.waits or core.scheduler.in_flight:
            return
        if update.requests == "finish" and core.scheduler.num_unfinished:
            return
        core.requests.deliver()
        update.waits, update.loads = False, True
        try:
            self._check_awake()
            core.scheduler.preempt_all()
            files = [msgspec.to_builtins(file) for file in self._files(update.weights)]
            core.calls.call(
                "load_weights", {"files": files}, lambda outcome: self._loaded_by_all(update, outcome)
            )
        except Exception as error:
            self._end(update, error)

    def _loaded_by_all(self, update: Update, outcome: Outcome) -> None:
        """Go on with the new weights; or replace the workers, if what they have is unknown."""
        if isinstance(outcome, Exception):
            self._core.worker.kill()
            return self._end(update, outcome)
        files = self._files(update.weights)
        kept = self._kept(update.weights)
        for weights in self._loaded:
            if weights not in kept:
                weights.close()
        self._loaded = [*kept, update.weights]
        self._num_updates += 1
        worker, version = self._core.worker, WeightsVersion(update.version, secrets.token_bytes(KEY_BYTES))
        worker.config = msgspec.structs.replace(worker.config, weights=files)
        self._core.scheduler.sequences.change_weights(version)
        logger.info(
            "the weights are %r since %.1f s after the call", version.name, time.monotonic() - update.since
        )
        self._end(update, None)

    def _end(self, update: Update, error: Exception | None) -> None:
        """Answer an update, and let requests run."""
        self._update = None
        self._core.lobby.awaits_weights = False
        if error is None:
            return update.caller.reply(update.version)
        update.weights.close()
        update.caller.refuse(error)

    def _kept(self, weights: OpenWeights) -> list[OpenWeights]:
        """The loaded weights of which some are not replaced by later ones, or by these."""
        replaced, kept = set(weights.tensors), []
        for earlier in reversed(self._loaded):
            if not earlier.tensors.keys() <= replaced:
                kept.append(earlier)
                replaced |= earlier.tensors.keys()
        return kept[::-1]

    def _files(self, weights: OpenWeights) -> list[WeightFile]:
        return [file for part in (*self._kept(weights), weights) for file in part.files]

    # ------------------------------------------------------------ what the model has, and uploads

    def _ask(self, known: Callable[[Exception | None], None]) -> None:
        """Call `known` once the workers have said what the model has, or with the error why its weights stay."""
        if self._own:
            return known(None)

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                return known(outcome)
            own = msgspec.convert(outcome[0], list[TensorForm])
            self._own = {tensor.name: tensor for tensor in own}
            known(None)

        try:
            self._core.sleep.check_workers("begin_weights")
            self._core.calls.call("weight_tensors", {}, done)
        except Exception as error:
            known(error)

    def _take(self, caller: FrontendCall, number: int) -> OpenWeights:
        """The tensors of an upload, which is over.

        Raises:
            ValueError: there is no such upload of this frontend, or some of it is missing.
        """
        weights = self._upload_of(caller, number).take()
        self._upload = None
        return weights

    def _upload_of(self, caller: FrontendCall, number: int) -> Upload:
        upload = self._upload
        if upload is None or (upload.number, upload.owner) != (number, caller.identity):
            raise ValueError(f"this frontend has no upload {number}: begin_weights begins one")
        return upload

    def _drop_upload(self) -> None:
        if self._upload is not None:
            self._upload.close()
            self._upload = None

    def _check_awake(self) -> None:
        if self._core.sleep.holds_steps:
            raise EngineBusyError("update_weights: the engine sleeps, or is about to; wake_up comes first")

    # ------------------------------------------------------------ the loop

    @property
    def holds_steps(self) -> bool:
        """True while the workers load weights, or are about to."""
        update = self._update
        return update is not None and (update.loads or (update.waits and update.requests != "finish"))

    @property
    def awaits_workers(self) -> bool:
        """True while an update goes on."""
        return self._update is not None

    def check_timers(self, now: float) -> None:
        """End an update for which requests take too long."""
        update = self._update
        if update is not None and update.waits and now - update.since > (CALL.seconds or 0.0):
            self._end(update, TimeoutError(f"{CALL.name}: requests still run after {CALL.seconds:g} s"))

    def tidy(self) -> None:
        """Drop the upload of a frontend that is gone."""
        if self._upload is not None and self._upload.owner not in self._core.clients.attached:
            self._drop_upload()

    def close(self) -> None:
        """Close all files."""
        self._drop_upload()
        for weights in self._loaded:
            weights.close()


def has_begun(sequence: Sequence) -> bool:
    """True if a step has run some of a sequence."""
    return sequence.num_cached_tokens is not None
