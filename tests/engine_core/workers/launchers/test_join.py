"""Workers that join over TCP: a whole core, and agents as processes of their own, which are killed and stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from pagewire.engine_core.workers.launchers.join import JoinLauncher
from pagewire.engine_core.workers.launchers.listener import admit_workers
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.join.join_messages import Dismissed, Ended, FromAgent, Join, Started, StartWorker
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.sockets import bind_router, receive, send
from pagewire.workers.process.agent import Agent
from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.test_core import roll_out

PROGRAM = str(Path(__file__).with_name("agent_program.py"))
START_SECONDS = 30


class Site:
    """A core that waits for two workers to join, and the agents that tests start."""

    def __init__(self, start_core: Callable[..., RunningCore], folder: Path) -> None:
        self.key_file = folder / "join.key"
        self.launcher = JoinLauncher("tcp://127.0.0.1:0", self.key_file, 2)
        self.core = start_core(num_workers=2, launcher=self.launcher)
        self.agents: list[subprocess.Popen[str]] = []

    def agent(self, rank: int | str, *version: str, key_file: Path | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, PROGRAM, self.launcher.address, str(key_file or self.key_file), str(rank)]
        agent = subprocess.Popen([*command, *version], stdout=subprocess.PIPE, text=True)
        self.agents.append(agent)
        return agent

    def refusal(self, rank: int | str, *version: str, key_file: Path | None = None) -> str:
        """What an agent that cannot join says at its end."""
        agent = self.agent(rank, *version, key_file=key_file)
        output = agent.communicate(timeout=START_SECONDS)[0]
        assert agent.returncode == 1
        return output

    def attached(self) -> RawFrontend:
        frontend = self.core.frontend()
        frontend.attach()
        return frontend


@pytest.fixture
def site(
    start_core: Callable[..., RunningCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    monkeypatch.setattr("pagewire.engine_core.workers.launchers.join.TICK_SECONDS", 0.1)
    site = Site(start_core, tmp_path)
    yield site
    for agent in site.agents:
        agent.kill()
        agent.wait()


def run_until(frontend: RawFrontend, count: int) -> None:
    """Read until `count` more tokens have come."""
    goal = sum(map(len, frontend.outputs.values())) + count
    while sum(map(len, frontend.outputs.values())) < goal:
        frontend.take(frontend.hear())


def test_streams_go_on_when_workers_and_agents_are_lost(site: Site) -> None:
    agents = [site.agent("any"), site.agent("any")]
    frontend = site.attached()
    for key in range(4):
        frontend.submit(key, [key + 1] * 5, max_tokens=120)
    run_until(frontend, 20)
    first = site.core.workers.pids
    os.kill(first[1], signal.SIGKILL)
    run_until(frontend, 40)
    second = site.core.workers.pids
    assert not set(first) & set(second) and not any(map(psutil.pid_exists, first))
    agents[0].kill()  # its worker ends with it
    agents[0].wait()
    site.agent("any")
    frontend.finish(*[(key, 0) for key in range(4)])
    for key in range(4):
        assert frontend.outputs[key, 0] == roll_out([key + 1] * 5, 120)
    assert site.core.workers.num_starts >= 3
    assert frontend.call("collective_rpc", "echo", [7]).result == [[7], [7]]
    site.core.stop()
    assert [agent.wait(START_SECONDS) for agent in site.agents[1:]] == [0, 0]
    assert all(map(has_ended, second))


def has_ended(pid: int) -> bool:
    """True of a process that has ended, also if the one that must take note of it has not done so."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_that_hangs_is_killed_by_its_agent(
    start_core: Callable[..., RunningCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "1")
    site = Site(start_core, tmp_path)
    site.agent(1), site.agent(0)
    frontend = site.attached()
    frontend.submit(1, [1, 2, 3], max_tokens=120)
    run_until(frontend, 20)
    pids = site.core.workers.pids
    os.kill(pids[1], signal.SIGSTOP)
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2, 3], 120)
    assert not any(map(psutil.pid_exists, pids))
    site.core.stop()
    assert [agent.wait(START_SECONDS) for agent in site.agents] == [0, 0]


def test_agents_outlive_their_core_and_join_the_next(
    site: Site, start_core: Callable[..., RunningCore]
) -> None:
    agents = [site.agent(0), site.agent(1)]
    site.attached()
    address = site.launcher.address
    site.launcher._agents.clear()  # so that the core ends without a word, as one that is killed
    site.core.stop()
    second = JoinLauncher(address, site.key_file, 2)
    core = start_core(num_workers=2, launcher=second)
    frontend = core.frontend()
    frontend.attach()
    frontend.submit(1, [1, 2, 3], max_tokens=5)
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2, 3], 5)
    core.stop()
    assert [agent.wait(START_SECONDS) for agent in agents] == [0, 0]


def test_who_cannot_join_is_told_why(site: Site, tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    GroupKey.read_or_make(other)
    assert f"its key is not that in {other}" in site.refusal(0, key_file=other)
    assert "the worker has pagewire 9.9.9" in site.refusal(0, "9.9.9")
    assert "no rank 2 in a group of 2" in site.refusal(2)
    site.agent(0)
    while 0 not in site.launcher._agents:
        pass
    assert "rank 0 has joined already, from " in site.refusal(0)
    site.agent("any")
    site.attached()
    assert "all 2 ranks have joined already" in site.refusal("any")


def test_an_agent_kills_its_worker_if_the_core_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_HEARTBEAT_TIMEOUT_S", "1")
    monkeypatch.setattr("pagewire.workers.process.agent.TICK_MS", 50)
    key = GroupKey.read_or_make(tmp_path / "key")
    with zmq.Context() as context:
        gate = Gate(context, admit_workers(key))
        gate.start()
        core = bind_router(context, "tcp://127.0.0.1:0", key.core)
        address = core.last_endpoint.decode()  # type: ignore[union-attr]
        codec: Codec[FromAgent] = Codec(FromAgent)

        def heard() -> FromAgent:
            assert core.poll(20_000)
            return codec.decode(receive(core)[1:])

        sleeper = (sys.executable, "-c", "import threading; threading.Event().wait()")
        agent = Agent(address, tmp_path / "key", command=sleeper)
        thread = threading.Thread(target=agent.run)
        thread.start()
        name, *frames = receive(core)
        assert isinstance(codec.decode(frames), Join)
        send(core, [name, *codec.encode(StartWorker("worker-1-0", 1))])
        started = heard()
        assert isinstance(started, Started) and psutil.pid_exists(started.pid)
        while not isinstance(message := heard(), Join):  # it comes again, on another connection
            assert message == Ended("worker-1-0", "was killed by SIGKILL")
        assert not psutil.pid_exists(started.pid)
        send(core, [name, *codec.encode(Dismissed())])
        thread.join(START_SECONDS)
        assert not thread.is_alive()
        gate.stop()
        core.close()


def test_an_agent_gives_up_without_a_core(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    GroupKey.read_or_make(key_file)
    with pytest.raises(EngineDeadError, match=r"no core for workers at tcp://127.0.0.1:\d+ \(waited"):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        Agent(address, key_file, patience=0.0).run()


def test_ranks_that_never_join_are_named(
    start_core: Callable[..., RunningCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_WORKER_START_TIMEOUT_S", "0.1")
    monkeypatch.setattr("pagewire.engine_core.core.TICK_SECONDS", 0.1)
    site = Site(start_core, tmp_path)
    site.core.thread.join(START_SECONDS)
    text = str(site.core.error)
    assert "rank 0 has not joined (pagewire worker --join tcp://127.0.0.1:" in text
    assert "rank 1 has not joined" in text


def test_a_key_is_secret(tmp_path: Path) -> None:
    path = tmp_path / "key"
    key = GroupKey.read_or_make(path)
    assert GroupKey.read_or_make(path) == key and key.secret.hex() not in repr(key)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        GroupKey.read(path)
    path.chmod(0o600)
    path.write_text("pagewire-workers-1 abcd\n")
    with pytest.raises(ValueError, match="holds no key of workers"):
        GroupKey.read(path)
