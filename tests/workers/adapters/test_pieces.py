"""Adapters are loaded in pieces: short ones between two steps, long ones in a thread. Nothing waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from torch import Tensor

from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.lora import LoadAdapter, LoRAConfig
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.sockets import bind_router, receive, send
from pagewire.ipc.wire.worker_messages import FromWorker, WorkerCall, WorkerReply
from pagewire.workers.adapters import build, loader, pieces
from pagewire.workers.adapters.pieces import LARGE_BYTES, Piece, PieceRunner
from pagewire.workers.process import main
from tests.workers.driver import Driver, load_runner
from tests.workers.peft_adapters import AdaptedRunner
from tests.workers.random_adapters import SHAPES, make_tensors, write

PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
LIMITS = LoRAConfig(max_loras=8, max_lora_rank=8)


class Clock:
    """A second passes with each piece."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def work(name: str, kinds: str, log: list[tuple[str, str]], clock: Clock) -> Iterator[Piece]:
    """Work of short (s) and long (l) pieces, which logs the thread of each."""
    for kind in kinds:
        yield Piece.SHORT if kind == "s" else Piece.LONG
        log.append((name, threading.current_thread().name))
        clock.now += 1


def test_short_pieces_run_here_for_a_share_of_the_time_and_the_oldest_work_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "LEAST_SECONDS", 2.0)
    monkeypatch.setattr(pieces, "MOST_SECONDS", 4.0)
    clock, log = Clock(), list[tuple[str, str]]()
    runner = PieceRunner(lambda: None, clock)
    for name in ("first", "second"):
        runner.start(work(name, "s" * 8, log, clock))
    here, numbers = threading.current_thread().name, []
    for seconds_of_step in (0, 1000, 25, 0, 1000, 1000):
        clock.now += seconds_of_step
        before = len(log)
        assert runner.advance() == (len(log) < 16)
        numbers.append(len(log) - before)
    assert numbers == [2, 4, 3, 2, 4, 1]
    assert log == [("first", here)] * 8 + [("second", here)] * 8
    assert not runner.advance()


def test_long_pieces_run_in_the_thread_and_nothing_waits_for_them() -> None:
    clock, log = Clock(), list[tuple[str, str]]()
    begun, may_end, awake = threading.Event(), threading.Event(), threading.Event()

    def slow() -> Iterator[Piece]:
        yield Piece.LONG
        begun.set()
        assert may_end.wait(60)
        yield from work("slow", "lsls", log, clock)

    runner = PieceRunner(awake.set, clock)
    runner.start(slow())
    assert begun.wait(60)
    runner.start(work("other", "sss", log, clock))
    while runner.advance():
        pass
    here = threading.current_thread().name
    assert log == [("other", here)] * 3 and not awake.is_set()
    may_end.set()
    while len(log) < 7:
        assert awake.wait(60)
        awake.clear()
        while runner.advance():
            pass
    assert log[3:] == [("slow", "long-pieces"), ("slow", here)] * 2


def bits(runner: AdaptedRunner, adapters: list[int]) -> list[Any]:
    params = SamplingParams(temperature=0.0, logprobs=2)
    requests = Driver(runner.runner).run(PROMPTS[: len(adapters)], 6, params, adapters=adapters)
    return [(request.output, request.logprobs) for request in requests]


def test_steps_run_while_the_disk_is_waited_for_and_between_all_pieces(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of other requests come meanwhile, the same as ever; so do the adapter's own, afterwards."""
    monkeypatch.setattr(pieces, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(pieces, "MOST_SECONDS", 0.0)
    runner = AdaptedRunner(llama, LIMITS)
    assert runner.load(1, write(tmp_path / "first", tensors=make_tensors(1))).error is None
    folder = write(tmp_path / "second", tensors=make_tensors(2))
    before = bits(runner, [1, 0])

    begun, may_end, awake = threading.Event(), threading.Event(), threading.Event()
    read_config = loader.read_config

    def slow(folder: Path) -> bytes:
        begun.set()
        assert may_end.wait(60)
        settings = read_config(folder)
        awake.set()
        return settings

    monkeypatch.setattr(loader, "read_config", slow)
    adapters = runner.runner.adapters
    adapters.load(LoadAdapter(2, str(folder)))
    assert begun.wait(60)
    assert not adapters.advance() and bits(runner, [1, 0]) == before  # it waits for the disk
    may_end.set()
    assert awake.wait(60)
    num_pieces, message = 0, None
    while message is None:
        num_pieces += adapters.advance()
        assert bits(runner, [1, 0]) == before
        message = next(iter(adapters.finished()), None)
    assert message.error is None and num_pieces >= 2 * len(SHAPES)  # a tensor, or a module, with each
    alone = AdaptedRunner(llama, LIMITS)
    assert alone.load(1, folder).error is None
    assert bits(runner, [2, 1])[:1] == bits(alone, [1])


def test_large_matrices_are_left_to_the_thread(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps no piece works on one; the products are the same."""
    folder = write(tmp_path)  # with matrices of 1024 and, in the other module, up to 1600 bytes
    largest = {"MainThread": 0, "long-pieces": 0}
    panels = build.panels

    def noted(second: Tensor) -> Tensor:
        name = threading.current_thread().name
        largest[name] = max(largest[name], second.nbytes)
        return panels(second)

    monkeypatch.setattr(build, "panels", noted)
    runner = AdaptedRunner(llama, LIMITS)
    assert runner.load(1, folder).error is None
    assert largest == {"MainThread": 1024, "long-pieces": 0} and LARGE_BYTES > 1600
    expected = bits(runner, [1])
    for limit, first, second in ((1599, 1024, 1024), (1023, 0, 1024)):
        largest = {"MainThread": 0, "long-pieces": 0}
        monkeypatch.setattr(build, "LARGE_BYTES", limit)
        monkeypatch.setattr(loader, "LARGE_BYTES", limit)
        assert runner.load(2, folder).error is None
        assert largest == {"MainThread": first, "long-pieces": second}
        assert bits(runner, [2]) == expected


def test_messages_are_taken_between_pieces_and_pieces_between_messages(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = bind_router(context, f"ipc://{tmp_path}/core.sock")
    connection = main.CoreSession(f"ipc://{tmp_path}/core.sock", "worker")
    calls = 0

    def advance() -> bool:
        nonlocal calls
        calls += 1
        if calls == 5:
            for call_id in (1, 2):
                send(socket, [b"worker", *codec.encode(WorkerCall(call_id, "ping"))])
        return True  # there is always more

    codec = Codec[Any](FromWorker)
    try:
        connection.send(WorkerReply(0))
        assert socket.poll(10_000) and codec.decode(receive(socket)[1:]) == WorkerReply(0)
        first = connection.receive(advance=advance)
        assert isinstance(first, WorkerCall) and first.call_id == 1 and calls >= 5
        before = calls
        second = connection.receive(advance=advance)
        assert isinstance(second, WorkerCall) and second.call_id == 2 and calls > before
    finally:
        connection.close()
        context.destroy(0)


def test_a_dropped_adapter_is_read_no_further(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(pieces, "MOST_SECONDS", 0.0)
    awake = threading.Event()
    runner, _ = load_runner(llama, wake=awake.set, lora=LIMITS)
    adapters = runner.adapters
    adapters.load(LoadAdapter(1, str(write(tmp_path))))
    assert awake.wait(60)
    awake.clear()
    assert not adapters.advance()  # it knows the configuration, and waits for the tensors
    assert awake.wait(60) and adapters.advance()
    adapters.drop(1)
    assert not adapters.advance() and adapters.finished() == [] and adapters.num_bytes == 0
