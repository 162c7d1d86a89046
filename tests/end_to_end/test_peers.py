"""Cores that fetch KV blocks from each other: a session that moves takes its prefix along."""

from __future__ import annotations

import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from pagewire import LLM
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.calls import TICKET_BYTES
from pagewire.ipc.wire.messages import Call, CallAnswer, Hello, Welcome
from pagewire.ipc.wire.sockets import CurveKeys
from tests.end_to_end import test_tiers_states
from tests.end_to_end.conftest import Daemon
from tests.end_to_end.http_server import Server
from tests.end_to_end.test_tiers import CACHED, GREEDY, PROMPTS, SEEDED, engine, run
from tests.engine_core.tiers.test_peer_links import INFO, OtherCore
from tests.workers.architectures import SERVED

BLOCKS = CACHED // 16


def addresses(number: int) -> list[str]:
    """Addresses on loopback that are free now."""
    probes = [socket.socket() for _ in range(number)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    names = [f"tcp://127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return names


def metric(llm: LLM, name: str, event: str | None = None) -> float:
    """The value of a metric, for one of its events."""
    rows = [row for row in llm.session.call("metrics").result() if row["name"] == f"pagewire:{name}"]
    (value,) = [row["value"] for row in rows if event in (None, row["labels"].get("event"))]
    return float(value)


def wait_for_peers(*engines: LLM) -> None:
    """Wait until each engine knows of one other core."""
    for llm in engines:
        while metric(llm, "kv_peers") != 1:
            pass


@contextmanager
def cores(*options: list[str]) -> Iterator[list[Daemon]]:
    """Cores of one thread, started side by side; each has its address and more options."""
    with ThreadPoolExecutor(len(options)) as pool:
        daemons = list(pool.map(lambda own: Daemon(own[0], "--num-threads", "1", *own[1:]), options))
    try:
        yield daemons
    finally:
        for daemon in daemons:
            if daemon.process.poll() is None:
                daemon.process.send_signal(signal.SIGCONT)
                daemon.stop()
            else:
                daemon.close()


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[str, list[list[int]]]]:
    """What a core without others generates, cold."""
    with engine(None, enable_prefix_caching=False) as llm:
        yield {"greedy": run(llm, PROMPTS)[0], "seeded": run(llm, PROMPTS, SEEDED)[0]}


@pytest.fixture
def pair() -> Iterator[list[Daemon]]:
    """Two cores over tcp, each of which asks the other."""
    names = addresses(2)
    with cores(*([name, "--kv-peers", ",".join(names)] for name in names)) as daemons:
        yield daemons


def test_a_session_that_moves_takes_its_prefix_along(
    pair: list[Daemon], expected: dict[str, list[list[int]]]
) -> None:
    with LLM.attach(pair[0].address) as one, LLM.attach(pair[1].address) as other:
        wait_for_peers(one, other)
        assert run(one, PROMPTS[:2]) == (expected["greedy"][:2], [0, 0])
        assert run(other, PROMPTS[:2]) == (expected["greedy"][:2], [CACHED, CACHED])
        assert run(other, PROMPTS[:2], SEEDED) == (expected["seeded"][:2], [CACHED, CACHED])
        assert metric(other, "kv_peer_blocks_total", "fetched") == 2 * BLOCKS
        assert metric(other, "kv_peer_blocks_total", "hit") == metric(one, "kv_peer_blocks_total", "lent")
        assert metric(other, "kv_peer_blocks_total", "damaged") == 0
        num_bytes = metric(other, "kv_peer_bytes_total", "fetched")
        assert 0 < num_bytes < metric(one, "kv_peer_bytes_total", "lent") < 1.1 * num_bytes
        # The next turn goes on in the other core, the one after it in the first again.
        turn = PROMPTS[0] + expected["greedy"][0] + PROMPTS[3][:100]
        (output,) = other.generate([turn], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == (len(PROMPTS[0]) + 11) // 16 * 16
        turn += [*output.outputs[0].token_ids, 300]
        (output,) = one.generate([turn], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens is not None and output.num_cached_tokens > len(PROMPTS[0]) + 100
        with engine(None) as alone:
            (same,) = alone.generate([turn], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == same.outputs[0].token_ids


def test_a_salt_keeps_tenants_apart_in_all_cores(pair: list[Daemon]) -> None:
    def cached(llm: LLM, salt: str) -> int:
        prompt = {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)  # type: ignore[list-item]
        return output.num_cached_tokens or 0

    with LLM.attach(pair[0].address) as one, LLM.attach(pair[1].address) as other:
        wait_for_peers(one, other)
        assert [cached(one, "mine"), cached(other, "yours"), cached(other, "mine")] == [0, 0, CACHED]


def test_a_hybrids_states_come_along_from_a_copy_of_the_model(tmp_path: Path) -> None:
    """Bit for bit: with log probabilities."""
    folder = SERVED["qwen3_5_text"].write(tmp_path / "model")
    shutil.copytree(folder, tmp_path / "copy")
    first, second = addresses(2)
    with (
        cores(
            [first, "--kv-peers", second, "--model", str(folder), "--skip-tokenizer-init"],
            [second, "--kv-peers", first, "--model", str(tmp_path / "copy"), "--skip-tokenizer-init"],
        ),
        LLM.attach(first) as one,
        LLM.attach(second) as other,
    ):
        wait_for_peers(one, other)
        expected, cached = test_tiers_states.run(one)
        assert cached == [0, 0, 0]
        assert test_tiers_states.run(other) == (expected, [test_tiers_states.CACHED] * 3)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_core_that_ends_or_hangs_while_others_fetch(
    pair: list[Daemon], expected: dict[str, list[list[int]]], number: signal.Signals
) -> None:
    """Its death falls anywhere: before it is asked, while blocks are on their way, or later."""
    with LLM.attach(pair[0].address) as one, LLM.attach(pair[1].address) as other:
        wait_for_peers(one, other)
        run(one, PROMPTS)
        with ThreadPoolExecutor(1) as pool:
            outputs = pool.submit(other.generate, PROMPTS * 4, GREEDY, use_tqdm=False)
            while not metric(other, "kv_peer_questions_total", "asked"):
                pass
            pair[0].process.send_signal(number)
            tokens = [list(output.outputs[0].token_ids) for output in outputs.result()]
        assert tokens == expected["greedy"] * 4
        run(other, [[7, *prompt] for prompt in PROMPTS])


# ---------------------------------------------------------------- a peer that does its worst


class WrongCore(threading.Thread):
    """A core that says it has everything. give: makes its answer with blocks; None: it never comes."""

    def __init__(self, address: str, give: Callable[[Call], bytes | None]) -> None:
        super().__init__(daemon=True)
        self.core, self._give = OtherCore(address), give
        self.num_fetches = 0
        self._ends = False

    def run(self) -> None:
        while not self._ends:
            if not self.core.socket.poll(100):
                continue
            self.core.peer, *frames = self.core.socket.recv_multipart()
            message = self.core.codec.decode(frames)
            if isinstance(message, Hello):
                self.core.say(Welcome(INFO, "test", 1.0))
            elif isinstance(message, Call) and message.method == "find_blocks":
                self.core.say(CallAnswer(message.call_id, b"\1" * (len(message.args[1]) // 32)))
            elif isinstance(message, Call):
                self.num_fetches += 1
                if (content := self._give(message)) is not None:
                    with suppress(zmq.ZMQError):  # it is gone, since it was sent too much
                        self.core.say(CallAnswer(message.call_id, bytes(TICKET_BYTES) + content))

    def close(self) -> None:
        self._ends = True
        self.join()
        self.core.close()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nothing", b""),
        ("garbage", b"garbage" * 100),
        ("zeros", bytes(1 << 20)),
        ("too much", bytes(64 << 20)),
        ("silence", None),
    ],
)
def test_a_peer_that_does_its_worst_costs_time_and_no_token(
    tmp_path: Path, expected: dict[str, list[list[int]]], name: str, content: bytes | None
) -> None:
    address = f"ipc://{tmp_path}/wrong.sock"
    wrong = WrongCore(address, lambda call: content)
    wrong.start()
    try:
        with engine(None, kv_peers=address) as llm:
            wait_for_peers(llm)
            assert run(llm, PROMPTS[:2]) == (expected["greedy"][:2], [0, 0])
            assert wrong.num_fetches > 0
            assert metric(llm, "kv_peer_blocks_total", "hit") == 0
            damaged = metric(llm, "kv_peer_blocks_total", "damaged")
            assert (damaged > 0) is (name in ("garbage", "zeros"))
    finally:
        wrong.close()


# ---------------------------------------------------------------- keys and rights


def test_over_tcp_with_keys_a_stranger_gets_nothing(
    tmp_path: Path, expected: dict[str, list[list[int]]]
) -> None:
    (tmp_path / "clients").mkdir()
    for name in ("core", "me", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    for name in ("core", "me"):
        shutil.copy(tmp_path / f"{name}.key", tmp_path / "clients")
    rights = tmp_path / "rights.yaml"
    rights.write_text("curve:core: [blocks]\ncurve:me: [read, generate]\n")
    first, second, third = addresses(3)
    admits = ["--curve-clients", str(tmp_path / "clients")]
    keys = ["--curve-secret", str(tmp_path / "core.key_secret"), *admits, "--rights", str(rights)]
    strange = ["--curve-secret", str(tmp_path / "stranger.key_secret"), *admits, "--kv-peers", first]
    own = CurveKeys.load(tmp_path / "me.key_secret", tmp_path / "core.key")
    to_stranger = CurveKeys.load(tmp_path / "me.key_secret", tmp_path / "stranger.key")
    with (
        cores([first, *keys, "--kv-peers", second], [second, *keys, "--kv-peers", first], [third, *strange]),
        LLM.attach(first, curve=own) as one,
        LLM.attach(second, curve=own) as other,
    ):
        wait_for_peers(one, other)
        assert run(one, PROMPTS[:1]) == (expected["greedy"][:1], [0])
        assert run(other, PROMPTS[:1]) == (expected["greedy"][:1], [CACHED])
        with LLM.attach(third, curve=to_stranger) as stranger:
            assert run(stranger, PROMPTS[:1]) == (expected["greedy"][:1], [0])
            assert metric(stranger, "kv_peers") == 0
        with pytest.raises(PermissionError, match="needs the right 'blocks', which curve:me does not have"):
            one.session.call("find_blocks", b"", b"").result()
        rights.write_text("curve:core: [read]\ncurve:me: [read, generate]\n")
        assert run(one, PROMPTS[1:2])[1] == [0]
        for llm, number in (
            (one, 2),
            (other, 3),
        ):  # it hears with a question that it may not ask any more
            fresh = ([first, *PROMPTS[number]] for first in range(300, 2000))
            while metric(llm, "kv_peers"):
                run(llm, [next(fresh)])
        assert run(other, PROMPTS[1:2]) == (expected["greedy"][1:2], [0])


# ---------------------------------------------------------------- a router


def test_a_session_that_a_router_moves_takes_its_prefix_along(pair: list[Daemon], tmp_path: Path) -> None:
    where = [option for daemon in pair for option in ("--core", daemon.address)]
    server = Server(tmp_path, *where, "--port", "0", "--enable-admin", command="route")
    admin = {"X_Pagewire_Admin": "1"}

    def completion(prompt: list[int]) -> tuple[str, int]:
        """The text, and how many tokens of the prompt were cached."""
        body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    try:
        with LLM.attach(pair[0].address) as one, LLM.attach(pair[1].address) as other:
            wait_for_peers(one, other)
        text, cached = completion(PROMPTS[0])
        assert cached == 0 and completion(PROMPTS[0]) == (text, CACHED)
        status, listed = server.request("GET", "/cores", **admin)
        assert status == 200
        with LLM.attach(pair[0].address) as one:
            place = pair[0] if num_prompt_tokens(one) else pair[1]
        number = next(core["core"] for core in listed if core["place"] == place.address)
        assert server.request("POST", "/cores/drain", {"core": number, "move": True}, **admin)[0] == 200
        assert completion(PROMPTS[0]) == (text, CACHED)
    finally:
        assert server.stop() == 0


def num_prompt_tokens(llm: LLM) -> float:
    """Tokens of prompts that an engine has taken."""
    rows = llm.session.call("metrics").result()
    return float(sum(row["value"] for row in rows if row["name"] == "vllm:prompt_tokens_total"))


# ---------------------------------------------------------------- what is refused


def test_what_does_not_go_with_other_cores_is_refused_by_name(tmp_path: Path) -> None:
    for options, text in (
        ({"kv_peers": "nowhere"}, "kv_peers: 'nowhere' must begin with ipc:// or tcp://"),
        ({"kv_peers": ""}, "kv_peers: '' must begin with"),
        ({"kv_peers": "ipc:///a,ipc:///a"}, "kv_peers: the same address twice"),
        ({"kv_peers": ",".join(f"ipc:///{n}" for n in range(33))}, "33 addresses; at most 32"),
        (
            {"tensor_parallel_size": 2},
            "kv_peers does not go with tensor_parallel_size=2: each worker has its part",
        ),
        ({"enable_prefix_caching": False}, "kv_peers does not go with enable_prefix_caching=False"),
        ({"device": "cuda"}, "kv_peers does not go with device='cuda'"),
        ({"kv_cache_disk": "1GiB"}, "kv_cache_disk needs kv_cache_dir"),
    ):
        with pytest.raises(ValueError, match=text):
            EngineArgs.from_kwargs({"model": "demo", "kv_peers": "ipc:///a"} | options)
    with pytest.raises(
        ValueError, match="kv_peers: blocks of pictures and sounds cannot be kept elsewhere yet"
    ):
        LLM("demo-vision", device="cpu", kv_peers=f"ipc://{tmp_path}/other.sock")
    with pytest.raises(ValueError, match=r"kv_peers: .*is open to other machines: give CURVE keys"):
        engine(None, kv_peers="tcp://192.0.2.1:5555")
