"""Messages of frontends: attaching, new requests, aborts and calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pagewire.engine_core.admission.validation import check_request, vocab_size_of
from pagewire.engine_core.clients.access import may_name_paths
from pagewire.engine_core.clients.arrivals import Arrivals
from pagewire.engine_core.clients.clients import NOT_ATTACHED, AttachedClient
from pagewire.engine_core.clients.contents import Contents
from pagewire.engine_core.clients.early import RECEIVE_SECONDS, other_protocol
from pagewire.engine_core.engine import OpenEngine
from pagewire.engine_core.schedule.attachments import ActiveAdapter
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.ipc.errors import EngineBusyError, error_place, error_text, error_type
from pagewire.ipc.version import __version__
from pagewire.ipc.wire import messages
from pagewire.ipc.wire.calls import CALLS, Right
from pagewire.ipc.wire.items import Task
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import Call, Deltas, ToCore
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request, TokenDelta
from pagewire.ipc.wire.tasks import submitted

PING_SECONDS = 1.0  # interval at which frontends send `Ping`
MAX_CHECKED = 256  # tenants whose last task is known to be right


class CallTaker(Protocol):
    """Runs the calls of frontends."""

    def call(self, identity: bytes, call: Call) -> None:
        """Run a call, and answer it then or later; an error is an answer, too."""


class AdapterNames(Protocol):
    """The adapters that requests may name."""

    def find(self, source: AdapterSource, *, any_path: bool) -> ActiveAdapter:
        """The adapter that a request names. any_path: it may be one that is not registered.

        Raises:
            ValueError: there is none. PermissionError: another path needs `any_path`.
        """


class MessageIntake:
    """Handles what frontends send.

    calls: runs their calls. adapters: those that requests may name; None: there are none.
    """

    def __init__(self, core: OpenEngine, calls: CallTaker, adapters: AdapterNames | None = None) -> None:
        self._core, self._calls, self._adapters = core, calls, adapters
        self._num_arrivals = 0
        self._arrivals = Arrivals()
        self._contents = Contents()
        self._numbers: list[int] = []
        # By tenant, the last one that was checked: the prompts of a batch have one (`share_tasks`).
        self._checked: dict[str, Task] = {}

    @property
    def has_work(self) -> bool:
        """True while requests of messages that were read wait for the next `receive`."""
        return len(self._arrivals) > 0

    def receive(self) -> None:
        """Handle messages that have arrived, for about `RECEIVE_SECONDS`; the others wait for the next call.

        Half of the time is for reading, so that a message does not wait until the thousand requests of one before
        it are taken. What a message raises is answered, and ends no more than its sender.
        """
        begin = time.thread_time()
        self._read(begin + RECEIVE_SECONDS / 2)
        self._take_requests(begin + RECEIVE_SECONDS)

    def _read(self, deadline: float) -> None:
        if self._arrivals.full:
            return
        for identity, message, num_bytes in self._core.clients.messages(time.monotonic()):
            if message is not None:
                self._guarded(identity, self._handle, identity, message, num_bytes)
                self._make_calls()  # that wait for nothing: requests which are read after a call come after it
            if self._arrivals.full or time.thread_time() >= deadline:
                return

    def _take_requests(self, deadline: float) -> None:
        """Submit requests that were read: all, or as many as there is time for, and one. Then make calls."""
        attached = self._core.clients.attached
        while self._arrivals:
            client, request = self._arrivals.pop()
            if attached.get(client.identity) is client:
                self._guarded(client.identity, self._submit, client, request)
            if time.thread_time() >= deadline:
                break
        else:
            self._checked.clear()
        self._make_calls()

    def _make_calls(self) -> None:
        """Make the calls that wait for no request."""
        attached = self._core.clients.attached
        for client, call in self._arrivals.pop_calls():
            if attached.get(client.identity) is client:
                self._guarded(client.identity, self._calls.call, client.identity, call)

    def _guarded(self, identity: bytes, handle: Callable[..., None], *args: Any) -> None:
        """Call `handle`; an exception of any kind ends at most this frontend's attachment."""
        try:
            handle(*args)
        except Exception as error:
            self._core.clients.fault(identity, error)

    def welcome(self, hellos: Mapping[bytes, messages.Hello]) -> None:
        """Attach the frontends that have waited for the engine to be ready."""
        for identity, hello in hellos.items():
            self._welcome(identity, hello)

    def _handle(self, identity: bytes, message: ToCore, num_bytes: int) -> None:
        clients = self._core.clients
        client = clients.attached.get(identity)
        if isinstance(message, messages.Hello):
            self._handshake(identity, message)
        elif client is None:
            clients.send(identity, messages.Detached(NOT_ATTACHED))
        elif isinstance(message, messages.Submit):
            self._arrived(client, message, num_bytes)
        elif isinstance(message, messages.Abort):
            self._abort(client, message)
        elif isinstance(message, messages.Call):
            if (declared := CALLS.get(message.method)) is not None and declared.overtakes:
                self._calls.call(identity, message)
            else:
                self._arrivals.add_call(client, message)
        elif isinstance(message, messages.Goodbye):
            clients.detach(client, "it disconnected")

    def _arrived(self, client: AttachedClient, message: messages.Submit, num_bytes: int) -> None:
        clients = self._core.clients
        try:
            requests = submitted(message)
        except ValueError as error:
            clients.warn("refused a message from %s: %s", client.label, error)
            clients.refuse(client.identity, error)
            return
        if self._arrivals.admits(client, requests, num_bytes):
            self._arrivals.add(client, requests, num_bytes)
            return
        cause = "it sent requests before the core had taken as many earlier ones as it must"
        clients.detach(client, cause)
        clients.send(client.identity, messages.Detached(cause))

    def _handshake(self, identity: bytes, hello: messages.Hello) -> None:
        if (why := other_protocol(hello)) is not None:
            self._core.clients.send(identity, messages.Refused(error=why))
        else:
            self._welcome(identity, hello)

    def _welcome(self, identity: bytes, hello: messages.Hello) -> None:
        clients = self._core.clients
        client = clients.attached.get(identity)
        if client is not None:
            clients.detach(client, "it attached again")
        clients.attach(identity, hello.name, hello.pid, time.monotonic())
        welcome = messages.Welcome(info=self._core.info, version=__version__, ping_seconds=PING_SECONDS)
        clients.send(identity, welcome)

    def _submit(self, client: AttachedClient, request: Request) -> None:
        core, now = self._core, time.monotonic()
        try:
            client.check_right(Right.GENERATE, "a request")
            if request.key in client.requests:
                raise ValueError(f"request key {request.key} is already in use")
            if request.key in client.backlog:
                raise ValueError(
                    f"request key {request.key} is in use until the output of its request is read"
                )
            if core.stopping:
                raise EngineBusyError("the engine core is shutting down and accepts no new requests")
            for wing in core.wings:
                wing.check_submit()
            self._check(request)
            release = self._charge(client, request)
            try:
                group = self._sequences(client, request, now)
                core.lobby.add(group, core.scheduler.waiting.num_before(group[0].tenant), now)
            except BaseException:
                release()
                raise
        except (ValueError, TypeError, EngineBusyError, PermissionError) as error:
            self._reject(client, request, error)
            return
        self._num_arrivals += len(group)
        for wing in core.wings:
            wing.submitted(group)
        client.requests.add(request.key, group, release)
        core.admit()

    def _check(self, request: Request) -> None:
        """Check a request, and its task unless the one before had the same; raises as `check_request`."""
        task = self._checked.get(request.tenant)
        check_request(request, self._core.info, task_known=request.task is task)
        if request.task is not task:
            if len(self._checked) >= MAX_CHECKED:
                self._checked.clear()
            self._checked[request.tenant] = request.task

    def _charge(self, client: AttachedClient, request: Request) -> Callable[[], None]:
        """Make a request as small as it can be, and charge its memory; returns what gives the memory back.

        Raises:
            ValueError, EngineBusyError: as `TenantAccounts.charge`.
        """
        self._share_numbers(request)
        self._contents.hold(request.prompt)
        if isinstance(request.task, SamplingParams) and not self._core.keeps_extra_args:
            request.task.extra_args = None  # nothing else reads them
        return self._core.tenants.charge(client.number, request.tenant or client.identity, request)

    def _sequences(self, client: AttachedClient, request: Request, now: float) -> list[Sequence]:
        """The sequences of a request; raises as `_name_adapter`."""
        core = self._core
        group = sequences(
            request,
            client.identity,
            self._num_arrivals,
            now,
            max_model_len=core.info.max_len_of(request.prompt),
            share_prefixes=core.shares_prefixes,
            tenant=core.tenants.get(request.tenant or client.identity),
            whole=core.info.pooling is not None and core.info.pooling.whole_prompts,
            cuts_media=core.info.media is not None and not core.info.media.whole,
            short_length=core.info.short_length,
        )
        self._name_adapter(client, group)
        return group

    def _share_numbers(self, request: Request) -> None:
        """Make lists of the integer objects that all requests have: those of its own take 32 bytes each."""
        numbers, prompt = self._numbers, request.prompt
        highest = max(vocab_size_of(request, self._core.info), 1 + max(prompt.token_ids))
        numbers += range(len(numbers), highest)
        prompt.token_ids = [numbers[token_id] for token_id in prompt.token_ids]
        for done in request.output_token_ids or ():
            done[:] = [numbers[token_id] for token_id in done]

    def _name_adapter(self, client: AttachedClient, group: list[Sequence]) -> None:
        """Give the sequences of a request the adapter that it names, if it names one.

        Raises:
            ValueError: there is none. PermissionError: the frontend may not name it.
        """
        source, adapters = group[0].request.adapter, self._adapters
        if source is None or adapters is None:
            return
        adapter = adapters.find(source, any_path=may_name_paths(client.peer, client.rights))
        for sequence in group:
            sequence.adapter = adapter

    def _reject(self, client: AttachedClient, request: Request, why: Exception) -> None:
        error, kind, place = error_text(why), error_type(why), error_place(why)
        for wing in self._core.wings:
            wing.refused(why)
        self._core.clients.warn("refused request %s of %s: %s", request.request_id, client.label, error)
        if (
            request.key in client.requests or request.key in client.backlog
        ):  # a delta would be for that request
            self._core.clients.send(client.identity, messages.Refused(error=error))
            return
        num_sequences = 1 if isinstance(request.task, PoolingParams) else request.task.n
        deltas = [
            TokenDelta(
                request.key, index, [], finish_reason="error", error=error, error_type=kind, error_place=place
            )
            for index in range(num_sequences)
        ]
        self._core.clients.deliver(client, Deltas(deltas))

    def _abort(self, client: AttachedClient, abort: messages.Abort) -> None:
        if len(self._arrivals):
            self._arrivals.remove(client, set(abort.keys))
            for request in self._arrivals.remove(client, {key for key, _ in abort.sequences}):
                self._guarded(client.identity, self._submit, client, request)
        for key in abort.keys:
            self._core.requests.drop(client.requests.end_all(key))
            client.backlog.forget(key)
        for key, index in abort.sequences:
            if (sequence := client.requests.end(key, index)) is not None:
                self._core.requests.drop([sequence], reason="stop")
