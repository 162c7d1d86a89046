"""The worker as a process, over ZeroMQ."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire.engine_core.workers.launchers.local import LocalLauncher
from pagewire.ipc.host.lifeline import Child
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.lora import AdapterLoaded, DropAdapter, LoadAdapter, LoRAConfig
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.sockets import bind_router, receive, send
from pagewire.ipc.wire.worker_messages import (
    FromWorker,
    Loading,
    Masks,
    Progress,
    Ready,
    Row,
    Shutdown,
    SlotInit,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerCall,
    WorkerConfig,
    WorkerFailed,
    WorkerHello,
    WorkerReply,
)
from pagewire.workers.process import main
from tests.workers.driver import GREEDY, tokens_of
from tests.workers.huge import write_huge
from tests.workers.random_adapters import write

WAIT_MS = 60_000


class OtherEnd:
    """The core's end of a worker's socket."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self.socket = socket
        self.codec: Codec[FromWorker] = Codec(FromWorker)

    def say(self, message: Any) -> None:
        send(self.socket, [b"w", *self.codec.encode(message)])

    def hear(self) -> FromWorker:
        assert self.socket.poll(WAIT_MS), "the worker says nothing"
        return self.codec.decode(receive(self.socket)[1:])

    def hear_after_progress(self) -> FromWorker:
        while isinstance(message := self.hear(), Progress | Loading):
            assert isinstance(message, Loading) or message.seconds >= 0
        return message


class Core(OtherEnd):
    """The same, with the worker process."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        address = f"ipc://{folder}/w"
        super().__init__(bind_router(self.context, address))
        command = [sys.executable, "-m", "pagewire.workers.process.main"]
        self.child = Child([*command, "--connect", address, "--identity", "w"])


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    core = Core(tmp_path)
    hello = core.hear()
    assert isinstance(hello, WorkerHello)
    assert (hello.protocol, hello.pid) == (PROTOCOL, core.child.pid)
    yield core
    core.child.kill()
    core.socket.close()
    core.context.term()


def load_message(folder: Path) -> WorkerConfig:
    return WorkerConfig(str(folder), max_model_len=64, max_num_seqs=4, num_blocks=32, num_threads=1)


def test_a_life(core: Core, llama: Path) -> None:
    core.child.process.send_signal(signal.SIGINT)  # the parent's to handle
    core.say(WorkerCall(1, "ping"))
    early = core.hear()
    assert isinstance(early, WorkerReply)
    assert early.error is not None and "no model" in early.error

    core.say(load_message(llama))
    ready = core.hear_after_progress()
    assert isinstance(ready, Ready)
    core.say(StepPlan(5, [Row(0, 0, 3, num_samples=1)], [SlotInit(0, [3, 4, 5], 3, [0], GREEDY, 0)]))
    result = core.hear()
    assert isinstance(result, StepResult)
    assert result.step_id == 5 and len(tokens_of(result)) == 1 and result.busy_us > 0

    core.say(WorkerCall(2, "ping"))
    assert core.hear() == WorkerReply(2, "pong")
    core.say(WorkerCall(3, "rm", ["-r"]))
    reply = core.hear()
    assert isinstance(reply, WorkerReply)
    assert (reply.call_id, reply.error_type) == (3, "ValueError")

    core.say(Shutdown())
    assert core.child.process.wait(20) == 0


def test_a_worker_that_gets_no_model_ends_in_order(core: Core) -> None:
    """Also while a thread of it still imports what runs models."""
    core.say(Shutdown())
    assert core.child.process.wait(120) == 0


def test_a_worker_that_waits_for_its_name(tmp_path: Path, llama: Path) -> None:
    """It connects once it has one, with all imported; without one, it ends."""
    with zmq.Context() as context:
        launcher = LocalLauncher(context)
        core = OtherEnd(launcher.listener.socket)
        launcher.start_ahead(0, launcher.listener.address)
        waiting = launcher._spares[0].child
        process = launcher.start(0, launcher.listener.address, "w")
        hello = core.hear()
        assert isinstance(hello, WorkerHello) and hello.pid == process.pid == waiting.pid
        core.say(load_message(llama))
        assert isinstance(core.hear_after_progress(), Ready)
        core.say(Shutdown())
        process.stop(20.0)
        launcher.start_ahead(0, launcher.listener.address)
        spare = launcher._spares[0]
        os.close(os.dup2(os.open(os.devnull, os.O_WRONLY), spare.identity_fd))  # the pipe ends without a name
        assert spare.child.process.wait(20) == 0
        del launcher._spares[0]
        launcher.close()


def test_adapters_are_loaded_beside_the_steps(core: Core, llama: Path, tmp_path: Path) -> None:
    """Also by a worker that has nothing else to do; one that cannot be loaded disturbs nothing."""
    config = load_message(llama)
    config.lora = LoRAConfig()
    core.say(config)
    assert isinstance(core.hear_after_progress(), Ready)
    adapter = write(tmp_path / "adapter")

    def first_token(step_id: int, index: int) -> int:
        init = SlotInit(0, [3, 4, 5], 3, [0], GREEDY, 0, adapter=index)
        core.say(StepPlan(step_id, [Row(0, 0, 3, num_samples=1)], [init]))
        result = core.hear()
        assert isinstance(result, StepResult) and result.step_id == step_id
        return tokens_of(result)[0]

    plain = first_token(1, 0)
    core.say(LoadAdapter(1, str(tmp_path / "none")))
    refused = core.hear()
    assert isinstance(refused, AdapterLoaded)
    assert (refused.index, refused.error_type) == (1, "FileNotFoundError")
    core.say(LoadAdapter(2, str(adapter)))
    loaded = core.hear()
    assert isinstance(loaded, AdapterLoaded)
    assert (loaded.index, loaded.error, loaded.rank) == (2, None, 4)
    assert first_token(2, 2) != plain
    assert first_token(3, 0) == plain
    core.say(LoadAdapter(3, str(adapter), loaded.content))
    core.say(DropAdapter(2))
    again = core.hear()
    assert again == AdapterLoaded(3, loaded.content, loaded.num_bytes, 4)
    core.say(
        StepPlan(4, [Row(1, 0, 3, num_samples=1)], [SlotInit(1, [3, 4, 5], 3, [1], GREEDY, 0, adapter=2)])
    )
    failed = core.hear()
    assert isinstance(failed, WorkerFailed) and "adapter 2 was planned, but is not loaded" in failed.error


def test_a_failed_step_ends_the_worker(core: Core, llama: Path) -> None:
    core.say(load_message(llama))
    assert isinstance(core.hear_after_progress(), Ready)
    core.say(StepPlan(1, [Row(2, 0, 3, num_samples=1)]))  # no SlotInit has filled slot 2
    failed = core.hear()
    assert isinstance(failed, WorkerFailed)
    assert not failed.fatal and "KeyError" in failed.error and "Traceback" in failed.traceback
    assert core.child.process.wait(20) == 1


def test_a_model_that_cannot_be_loaded_is_fatal(core: Core, tmp_path: Path) -> None:
    core.say(load_message(tmp_path))
    failed = core.hear_after_progress()
    assert isinstance(failed, WorkerFailed)
    assert failed.fatal and "holds neither model.safetensors nor" in failed.error
    assert core.child.process.wait(20) == 1


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(core: Core, tmp_path: Path) -> None:
    """Its weights are a hole in a file, larger than any memory."""
    core.say(load_message(write_huge(tmp_path)))
    failed = core.hear()  # nothing has begun yet
    assert isinstance(failed, WorkerFailed)
    assert failed.fatal and failed.lacks_memory and failed.error_type == "ValueError"
    assert failed.error.startswith("the model does not fit into memory: its weights take 1536.0")
    assert core.child.process.wait(20) == 1


def test_it_ends_with_its_parent(core: Core) -> None:
    core.child.release()
    assert core.child.process.wait(20) == 0


def test_a_masked_step_waits_for_its_masks(core: Core, llama: Path) -> None:
    core.say(load_message(llama))
    ready = core.hear_after_progress()
    assert isinstance(ready, Ready)
    words = -(-ready.vocab_size // 32)
    rows = [Row(0, 0, 3, num_samples=1), Row(1, 0, 2), Row(2, 0, 3, num_samples=1)]
    inits = [SlotInit(slot, [3, 4, 5], 3, [slot], GREEDY, 0) for slot in range(3)]
    core.say(StepPlan(1, rows, inits, masked=True))
    core.say(StepPlan(2, [Row(0, 3, 1, num_samples=1)]))
    core.say(WorkerCall(1, "ping"))
    only = 9
    bits = (1 << only).to_bytes(4 * words, "little")
    core.say(Masks(1, [1], Tensor("int32", (1, words), bits)))
    first, second, reply = core.hear(), core.hear(), core.hear()
    assert isinstance(first, StepResult) and isinstance(second, StepResult)
    assert (first.step_id, second.step_id, reply) == (1, 2, WorkerReply(1, "pong"))
    rows_of_first = [first.row(i) for i in range(first.num_rows)]
    assert [row.token_ids == [only] for row in rows_of_first] == [False, False, True]
    assert not any(row.error for row in rows_of_first)

    core.say(StepPlan(3, [Row(2, 3, 1, num_samples=1)], masked=True))
    core.say(Shutdown())  # rather than the masks
    assert core.child.process.wait(20) == 0


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (object(), "cannot contain object"),
        (1 << 70, "result cannot be sent"),
        (b"x" * 3000, "over the limit of 2,000"),
    ],
)
def test_a_result_that_no_message_holds_is_an_error_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: Any, text: str
) -> None:
    monkeypatch.setattr(main, "MAX_MESSAGE_BYTES", 2000)
    monkeypatch.setattr(main, "answer", lambda runner, call: WorkerReply(call.call_id, result))
    context: zmq.Context[Any] = zmq.Context()
    socket = bind_router(context, f"ipc://{tmp_path}/core.sock")
    connection = main.CoreSession(f"ipc://{tmp_path}/core.sock", "worker")
    try:
        main.reply(connection, None, WorkerCall(3, "odd"))
        assert socket.poll(10_000)
        reply = Codec[Any](FromWorker).decode(receive(socket)[1:])
    finally:
        connection.close()
        context.destroy(0)
    assert (
        reply.call_id == 3
        and reply.error.startswith("odd: the result cannot be sent")
        and text in reply.error
    )


def test_a_message_makes_a_descriptor_readable(tmp_path: Path) -> None:
    """While compiled steps run, nothing but their descriptors says that the core wants something."""
    context: zmq.Context[Any] = zmq.Context()
    socket = bind_router(context, f"ipc://{tmp_path}/core.sock")
    connection = main.CoreSession(f"ipc://{tmp_path}/core.sock", "worker")
    codec: Codec[Any] = Codec(ToWorker)
    try:
        connection.send(WorkerReply(1))
        assert socket.poll(10_000)
        receive(socket)
        for step_id in range(20):
            assert connection.is_quiet()
            assert select.select(connection.descriptors, [], [], 0)[0] == []
            socket.send_multipart([b"worker", *codec.encode(StepPlan(step_id, []))])
            assert select.select(connection.descriptors, [], [], 10)[0] == connection.descriptors[:1]
            assert not connection.is_quiet()
            message = connection.receive()
            assert isinstance(message, StepPlan) and message.step_id == step_id
        assert connection.is_quiet()
        connection.wake()
        assert connection.descriptors[1] in select.select(connection.descriptors, [], [], 10)[0]
        assert not connection.is_quiet() and connection.receive() is None
    finally:
        connection.close()
        context.destroy(0)


def test_an_idle_worker_gives_memory_back_after_its_other_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: zmq.Context[Any] = zmq.Context()
    socket = bind_router(context, f"ipc://{tmp_path}/core.sock")
    connection = main.CoreSession(f"ipc://{tmp_path}/core.sock", "worker")
    done: list[str] = []

    def populate() -> Iterator[None]:
        for _ in range(3):
            done.append("populate")
            yield

    def release() -> None:
        done.append("release")
        connection.wake()

    monkeypatch.setattr(main, "IDLE_MS", 1)
    monkeypatch.setattr(main, "release_spare_memory", release)
    spare_work = populate()
    try:
        assert connection.receive(spare=main.idle_work(spare_work)) is None
        assert connection.receive(spare=main.idle_work(spare_work)) is None
    finally:
        connection.close()
        socket.close()
        context.destroy(0)
    assert done == ["populate"] * 3 + ["release"] * 2
