"""Frontends that do not read, use keys again, or send what cannot be handled: none of them harms another."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire.engine_core.admission.validation import check_params
from pagewire.engine_core.clients.clients import MAX_FAULTS, AttachedClient
from pagewire.ipc.wire.budget import MAX_HELLO_BYTES
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    Abort,
    Call,
    Deltas,
    Detached,
    Hello,
    Refused,
    Submit,
    Welcome,
)
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.tasks import submission
from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.test_core import roll_out


def attached(core: RunningCore, name: str) -> RawFrontend:
    frontend = core.frontend(name)
    frontend.attach()
    return frontend


def refused_requests(count: int, first: int = 0) -> Submit:
    """Requests that the core refuses one by one: their prompts are empty."""
    params = SamplingParams(n=64)
    return Submit([Request(first + i, "r", Prompt([]), params, 7) for i in range(count)])


class FullQueue:
    """Makes the queue to one frontend full, as if it did not read, until `empty` is called."""

    def __init__(self, core: RunningCore, frontend: RawFrontend, monkeypatch: pytest.MonkeyPatch) -> None:
        clients, name = core.clients, frontend.name.encode()
        self.client: AttachedClient = clients.attached[name]
        self.full = True
        real = clients._send_frames

        def send(identity: bytes, frames: list[Any]) -> bool:
            return not (self.full and identity == name) and real(identity, frames)

        monkeypatch.setattr(clients, "_send_frames", send)

    def empty(self) -> None:
        self.full = False

    def wait_for_end(self, key: int, watcher: RawFrontend) -> None:
        """Wait until the end of a request is in the backlog."""
        while not any(delta.key == key and delta.finish_reason for delta in self.client.backlog.deltas):
            watcher.status()


def test_a_key_in_the_backlog_is_not_used_again(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    watcher, slow = attached(core, "watcher"), attached(core, "slow")
    queue = FullQueue(core, slow, monkeypatch)
    slow.submit(1, [5, 6], logprobs=2, max_tokens=3)
    queue.wait_for_end(1, watcher)
    slow.submit(1, [5, 6], logprobs=5, max_tokens=3)
    while not core.serving.engine.metrics.num_refused["invalid"]:
        watcher.status()
    queue.empty()
    message = slow.hear()
    while not (isinstance(message, Deltas) and any(delta.key == 1 for delta in message.deltas)):
        message = slow.hear()
    (delta,) = [delta for delta in message if delta.key == 1]
    assert delta.token_ids == roll_out([5, 6], 3) and delta.logprobs.token_ids.shape == (3, 3)
    slow.submit(1, [5, 6], logprobs=5, max_tokens=3)  # it is free again
    while not (isinstance(message := slow.hear(), Deltas) and list(message)[-1].finish_reason == "length"):
        pass
    assert core.error is None


def test_an_abort_frees_a_key_in_the_backlog(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    watcher, slow = attached(core, "watcher"), attached(core, "slow")
    queue = FullQueue(core, slow, monkeypatch)
    slow.submit(1, [5, 6], max_tokens=3)
    queue.wait_for_end(1, watcher)
    slow.say(Abort(keys=[1]))
    while 1 in queue.client.backlog:
        watcher.status()
    slow.submit(1, [8, 9], max_tokens=4)
    queue.wait_for_end(1, watcher)
    queue.empty()
    tokens: list[int] = []
    while len(tokens) < 4:
        message = slow.hear()
        assert isinstance(message, Deltas), message
        tokens += [token for delta in message if delta.key == 1 for token in delta.token_ids]
    assert tokens == roll_out([8, 9], 4)


def test_output_of_a_request_that_was_given_up_is_not_that_of_the_next(
    start_core: Callable[..., RunningCore],
) -> None:
    """Many times, since the abort must come between a commit and its delivery."""
    frontend = attached(start_core(), "hasty")
    for key in range(200):
        frontend.submit(key % 2, [key], max_tokens=50)
        frontend.hear()
        frontend.say(Abort(keys=[key % 2]))
    frontend.submit(5, [5, 6], max_tokens=9)
    tokens: list[int] = []
    while len(tokens) < 9:
        message = frontend.hear()
        assert isinstance(message, Deltas), message
        tokens += [token for delta in message if delta.key == 5 for token in delta.token_ids]
    assert tokens == roll_out([5, 6], 9)


def test_a_frontend_that_leaves_too_much_unread_is_detached(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagewire.core")
    core = start_core(max_backlog_bytes=1 << 20)
    watcher, greedy = attached(core, "watcher"), attached(core, "greedy")
    monkeypatch.setattr("pagewire.ipc.wire.window.WINDOW_REQUESTS", 10_000)  # it sends no fences
    greedy.submit(1, [4, 4], max_tokens=120)
    client = FullQueue(core, greedy, monkeypatch).client
    for key in range(0, 5000, 50):
        greedy.say(refused_requests(50, key + 2))
    while len((status := watcher.status())["clients"]) > 1 or status["running"] + status["waiting"]:
        pass
    assert not client.backlog and status["num_free_blocks"] == status["num_blocks"]
    assert "does not read" in caplog.text and "limit of all frontends: 1,048,576" in caplog.text
    watcher.submit(1, [9, 9])
    watcher.finish((1, 0))
    assert watcher.outputs[1, 0] == roll_out([9, 9], 8)


def test_unread_answers_count_as_well(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core(max_backlog_bytes=1 << 20)
    watcher, greedy = attached(core, "watcher"), attached(core, "greedy")
    FullQueue(core, greedy, monkeypatch)
    for call_id in range(2000):
        greedy.begin_call(call_id, "metrics")
    while len(watcher.status()["clients"]) > 1:
        pass
    assert core.error is None


def test_the_limit_holds_for_all_frontends_together(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core(max_backlog_bytes=1 << 20)
    watcher, first, second = (attached(core, name) for name in ("watcher", "first", "second"))
    kept = FullQueue(core, first, monkeypatch).client
    FullQueue(core, second, monkeypatch)
    first.say(refused_requests(15))  # a delta for each of 64 outputs, and a third of the limit
    while 14 not in kept.backlog:
        watcher.status()
    second.say(refused_requests(40))
    while len(watcher.status()["clients"]) > 2:
        pass
    assert set(core.clients.attached) == {b"watcher", b"first"}
    assert len(list(kept.backlog.deltas)) == 15 * 64


def test_what_a_message_raises_ends_its_sender_alone(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = start_core()
    good, bad = attached(core, "good"), attached(core, "bad")
    real = core.serving.engine.lobby.add

    def add(group: list[Any], *rest: Any) -> None:
        if group[0].request_id == "r13":
            raise ZeroDivisionError("an oversight in the core")
        real(group, *rest)

    monkeypatch.setattr(core.serving.engine.lobby, "add", add)
    bad.submit(1, [1], max_tokens=120)
    for number in range(MAX_FAULTS):
        bad.submit(13, [1])
        while not isinstance(message := bad.hear(), Refused):
            pass
        assert message.error == "an oversight in the core", number
    assert "Traceback" in caplog.text and "ZeroDivisionError" in caplog.text
    while len((status := good.status())["clients"]) > 1 or status["running"] + status["waiting"]:
        pass
    assert status["num_free_blocks"] == status["num_blocks"]
    good.submit(1, [3, 4])
    good.finish((1, 0))
    assert good.outputs[1, 0] == roll_out([3, 4], 8)


def test_few_frontends_may_wait_for_the_engine(
    start_core: Callable[..., RunningCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hang := tmp_path / "hang").touch()
    monkeypatch.setenv("HANG_WHILE_STARTING", str(hang))
    monkeypatch.setattr("pagewire.engine_core.clients.early.MAX_EARLY", 2)
    core = start_core()
    waiting = [core.frontend(f"early {number}") for number in range(2)]
    for frontend in waiting * 2:  # one that greets again waits once
        frontend.say(Hello(PROTOCOL, "test", os.getpid(), frontend.name))
    late = core.frontend("late")
    while len(core.clients._peers) < len(waiting):
        pass
    late.say(Hello(PROTOCOL, "test", os.getpid(), late.name))
    refused = late.hear()
    assert isinstance(refused, Refused) and refused.error_type == "EngineBusyError"
    assert len(core.clients._peers) == len(waiting)
    worker = psutil.Process(core.workers.pids[0])
    while worker.status() != psutil.STATUS_STOPPED:
        pass
    worker.resume()
    assert all(isinstance(frontend.hear(), Welcome) for frontend in waiting)
    late.attach()
    assert not core.clients._peers


def test_a_flood_of_refusals_does_not_fill_the_log(
    start_core: Callable[..., RunningCore], caplog: pytest.LogCaptureFixture
) -> None:
    frontend = attached(start_core(), "noisy")
    frontend.say(refused_requests(1000))
    while (999, 63) not in frontend.ends:
        frontend.take(frontend.hear())
    assert 0 < sum("refused request" in record.getMessage() for record in caplog.records) <= 500


def test_requests_of_one_message_are_taken_in_turns(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of many requests is spread over iterations; an abort meets those that still wait, too."""
    monkeypatch.setattr("pagewire.engine_core.intake.RECEIVE_SECONDS", 0.0)
    core = start_core()
    many, other = attached(core, "many"), attached(core, "other")
    intake, waiting = core.serving.intake, []
    real = intake.receive

    def receive() -> None:
        real()
        waiting.append(len(intake._arrivals))

    monkeypatch.setattr(intake, "receive", receive)
    params = SamplingParams(max_tokens=100)
    many.say(Submit([Request(key, "r", Prompt([key + 1]), params, 7, eos_token_id=999) for key in range(60)]))
    many.status()  # a call waits for the requests before it
    assert set(range(1, 60)) <= set(waiting), "several requests were taken at once"
    many.say(Abort(keys=list(range(1, 60))))
    other.submit(1, [5, 6], max_tokens=20)
    many.finish((0, 0))
    other.finish((1, 0))
    assert other.outputs[1, 0] == roll_out([5, 6], 20) and many.outputs[0, 0] == roll_out([1], 100)
    again = [Request(100 + key, "r", Prompt([key + 1]), params, 7, eos_token_id=999) for key in range(60)]
    many.say(Submit(again))  # the first may have tokens before it is aborted
    many.say(Abort(keys=list(range(101, 160)), sequences=[(100, 0)]))
    assert many.status()["running"] == many.status()["waiting"] == 0 and core.error is None


def test_a_tenant_does_not_wait_until_the_prompts_of_another_are_submitted(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both come through one frontend, as those of a server do; so does the question for its health."""
    monkeypatch.setattr("pagewire.engine_core.intake.RECEIVE_SECONDS", 0.0)
    monkeypatch.setattr("pagewire.engine_core.intake.MAX_CHECKED", 1)
    core = start_core()
    server = attached(core, "server")
    order: list[str] = []
    real = core.serving.engine.lobby.add

    def add(group: list[Any], *rest: Any) -> None:
        order.append(group[0].request.tenant)
        assert len(core.serving.intake._checked) == 1
        real(group, *rest)

    def call(identity: bytes, message: Call) -> None:
        order.append(message.method)
        real_call(identity, message)

    monkeypatch.setattr(core.serving.engine.lobby, "add", add)
    real_call = core.serving.engine.control.call
    monkeypatch.setattr(core.serving.engine.control, "call", call)
    sent, receive = threading.Event(), core.serving.intake.receive
    monkeypatch.setattr(core.serving.intake, "receive", lambda: receive() if sent.is_set() else None)
    params = SamplingParams(max_tokens=2)
    for first in range(0, 500, 50):
        keys = range(first, first + 50)
        server.say(Submit([Request(key, "r", Prompt([5]), params, 7, tenant="many") for key in keys]))
    server.say(Submit([Request(500, "r", Prompt([6]), params, 7, tenant="one")]))
    server.begin_call(2, "check_health")
    sent.set()
    assert server.answer().result["alive"]
    server.status()
    server.finish((500, 0), (499, 0))
    # It takes 12 messages until they are read, some of which may still have been on their way.
    assert order.index("one") < 250 and order.index("check_health") < 250, "they waited for the others"
    assert order[-1] == "status" and len(order) == 503 and core.error is None
    assert server.outputs[500, 0] == roll_out([6], 2)


def test_equal_tasks_of_one_message_take_memory_once(start_core: Callable[..., RunningCore]) -> None:
    core = start_core()
    frontend = attached(core, "many")
    short = SamplingParams(max_tokens=10**6)
    long = SamplingParams(max_tokens=10**6, bad_words_token_ids=[[5, 6]] * 100)
    tasks = [long, long, long, short, long]
    frontend.say(Submit([Request(key, "r", Prompt([key + 1]), task, 7) for key, task in enumerate(tasks)]))
    frontend.status()
    requests = core.clients.attached[b"many"].requests
    held = [sequence.request.task for sequence in requests]
    assert held == tasks and held[0] is held[1] is held[2] and held[4] is not held[0]
    frontend.say(Abort(keys=list(range(5))))


def test_a_task_that_is_submitted_once_is_that_of_all(start_core: Callable[..., RunningCore]) -> None:
    core = start_core()
    frontend = attached(core, "many")
    task, other = SamplingParams(max_tokens=5), SamplingParams(max_tokens=3)
    tasks = [task, other, task, task]
    requests = [Request(key, "r", Prompt([key + 1, 7]), each, 7, 999) for key, each in enumerate(tasks)]
    frontend.say(submission(requests))
    for key, each in enumerate(tasks):
        frontend.finish((key, 0))
        assert frontend.outputs[key, 0] == roll_out([key + 1, 7], each.max_tokens or 0)
    frontend.say(Submit(requests, [0, 0, 3, 0]))
    while not isinstance(message := frontend.hear(), Refused):
        pass
    assert "task_of" in message.error and core.error is None
    assert frontend.status()["running"] == frontend.status()["waiting"] == 0


def test_a_task_is_checked_and_measured_once_for_all_its_prompts(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request may have a thousand prompts, and parameters with thousands of entries."""
    core = start_core()
    seen: list[SamplingParams] = []
    real = check_params
    monkeypatch.setattr(
        "pagewire.engine_core.admission.validation.check_params",
        lambda task, info: (seen.append(task), real(task, info)),
    )
    frontend = attached(core, "many")
    large = SamplingParams(max_tokens=2, logit_bias=dict.fromkeys(range(500), 1.0))
    wrong = SamplingParams(max_tokens=2, logit_bias={10**6: 1.0})
    tasks = [large, large, wrong, large, large]
    requests = [Request(key, "r", Prompt([key + 1]), task, 7) for key, task in enumerate(tasks)]
    frontend.say(submission(requests))
    for key in (0, 1, 3, 4):
        frontend.finish((key, 0))
    assert len(seen) == 2 and seen.count(large) == 1, "the refused task does not displace the one before it"
    assert core.serving.engine.metrics.num_refused["invalid"] == 1 and core.error is None


def test_prompts_have_their_numbers_in_common(start_core: Callable[..., RunningCore]) -> None:
    core = start_core()
    frontend = attached(core, "long")
    prompt = [500, 300, 300, 999, 0]
    for key in range(2):
        frontend.submit(key, prompt, max_tokens=10**6)
    frontend.status()
    first, second = core.clients.attached[b"long"].requests
    assert first.request.prompt.token_ids == second.request.prompt.token_ids == prompt
    assert first.request.prompt.token_ids is not second.request.prompt.token_ids
    for sequence in (first, second):
        numbers = [*sequence.request.prompt.token_ids, *sequence.token_ids[:5]]
        assert len(set(map(id, numbers))) == 4 and {*map(id, numbers)} == {*map(id, first.token_ids[:5])}
    frontend.say(Abort(keys=[0, 1]))


def test_messages_are_read_before_the_requests_of_earlier_ones_are_taken(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of many requests takes long, and the next may be of somebody else."""
    monkeypatch.setattr("pagewire.engine_core.intake.RECEIVE_SECONDS", 10.0)
    core = start_core()
    many, other = attached(core, "many"), attached(core, "other")
    order: list[bytes] = []
    real_add, real_messages = core.serving.engine.lobby.add, core.clients.messages
    held: list[Any] = []
    replaced = threading.Event()

    def add(group: list[Any], *rest: Any) -> None:
        order.append(group[0].client)
        real_add(group, *rest)

    def messages(now: float) -> Iterator[Any]:
        replaced.set()
        for one in real_messages(now):
            if isinstance(one[1], Submit):
                held.append(one)
            else:
                yield one
        if len(held) == 2:
            yield from sorted(held, key=lambda one: one[0])  # those of "many" first
            held.clear()

    monkeypatch.setattr(core.serving.engine.lobby, "add", add)
    monkeypatch.setattr(core.clients, "messages", messages)
    while not replaced.is_set():  # the core may still read by the iterator that it had
        other.status()
    params = SamplingParams(max_tokens=2)
    many.say(Submit([Request(key, "r", Prompt([5]), params, 7, eos_token_id=999) for key in range(300)]))
    other.submit(1, [6], max_tokens=2)
    other.finish((1, 0))
    many.finish((299, 0))
    assert order.index(b"other") == 1 and len(order) == 301


def test_who_sends_more_than_the_window_is_detached(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    flood, other = attached(core, "flood"), attached(core, "other")
    monkeypatch.setattr(core.serving.intake, "_take_requests", lambda deadline: None)
    flood.say(refused_requests(1000))
    flood.say(refused_requests(1, first=1000))
    message = flood.hear()
    assert isinstance(message, Detached) and "before the core had taken" in message.cause
    monkeypatch.undo()
    other.submit(1, [5, 6])
    other.finish((1, 0))
    flood.say(refused_requests(1))
    assert isinstance(flood.hear(), Detached)
    flood.attach()
    flood.submit(1, [5, 6])
    flood.finish((1, 0))
    assert core.error is None


def test_large_messages_of_who_is_not_attached_are_not_decoded(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    stranger, decoded = core.frontend("stranger"), []
    real = core.clients._codec.decode

    def decode(frames: list[Any], check: Any) -> Any:
        decoded.append(len(frames[0]))
        return real(frames, check)

    monkeypatch.setattr(core.clients._codec, "decode", decode)
    stranger.say(refused_requests(1000))
    assert isinstance(stranger.hear(), Detached)
    stranger.say(refused_requests(1))
    assert isinstance(stranger.hear(), Detached)
    stranger.attach()
    assert decoded and max(decoded) < MAX_HELLO_BYTES


def test_requests_of_a_frontend_that_is_detached_meanwhile_are_dropped(
    start_core: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = start_core()
    frontend, watcher = attached(core, "leaves"), attached(core, "watcher")
    intake, clients = core.serving.intake, core.clients
    real = intake._submit

    def submit(client: AttachedClient, request: Request) -> None:
        real(client, request)
        clients.detach(client, "it has ended")

    monkeypatch.setattr(intake, "_submit", submit)
    frontend.say(refused_requests(5))
    while len(clients) > 1:
        watcher.status()
    assert core.serving.engine.metrics.num_refused["invalid"] == 1 and not intake.has_work
