"""`pagewire core`: ready, attached to, drained, stopped at once, refused, and failing with one cause."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from pagewire import LLM, EngineDeadError, LLMEngine, SamplingParams
from tests.cli.command import COMMAND, PROMPT, SAMPLING, SMALL_KV, pagewire, start, start_core


def add_long_requests(engine: LLMEngine, count: int, max_tokens: int) -> None:
    """Requests that run already when this returns."""
    for index in range(count):
        engine.add_request(f"{index}", PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert engine.step()


def test_the_file_of_options_is_used_and_the_command_line_goes_before_it(address: str) -> None:
    with LLM.attach(address) as llm:
        info = llm.info
        assert (info.dtype, info.max_num_seqs) == ("float32", 64)
        assert info.num_blocks < 64 << 20 >> 10  # of the file's bytes, not of the default share


def test_a_core_takes_over_a_dead_ones_socket_and_drains(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    dead = start_core(address, *SMALL_KV)
    dead.kill()
    dead.communicate(timeout=60)
    assert (tmp_path / "core.sock").is_socket()
    core = start_core(address, *SMALL_KV)
    with LLM.attach(address) as llm:
        add_long_requests(llm.llm_engine, 1, 300)
        core.terminate()
        while llm.llm_engine.has_unfinished_requests():
            outputs = llm.llm_engine.step()
        assert len(outputs[0].outputs[0].token_ids) == 300
    out, _ = core.communicate(timeout=60)
    assert (core.returncode, out) == (0, "") and not list(tmp_path.iterdir())


def test_tcp_with_keys_one_core_per_address_and_a_second_signal(expected: str, tmp_path: Path) -> None:
    for name in ("core", "alice"):
        assert pagewire("keys", str(tmp_path), name).returncode == 0
    (tmp_path / "clients").mkdir()
    shutil.copy(tmp_path / "alice.key", tmp_path / "clients")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    listen = [*("--curve-secret", f"{tmp_path}/core.key_secret"), *("--curve-clients", f"{tmp_path}/clients")]
    core = start_core(address, *listen, *SMALL_KV, "--dtype", "float32")

    keys = ["--curve-secret", f"{tmp_path}/alice.key_secret", "--curve-server", f"{tmp_path}/core.key"]
    done = pagewire("generate", PROMPT, "--attach", address, *SAMPLING, *keys)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")
    done = pagewire("generate", PROMPT, "--attach", address, *SAMPLING)
    assert (done.returncode, done.stdout) == (1, "") and "CURVE keys" in done.stderr
    assert len(done.stderr.splitlines()) == 1

    second = pagewire("core", "--listen", address, *listen)
    assert (second.returncode, second.stdout) == (1, "")
    (line,) = second.stderr.splitlines()
    assert f"cannot listen on {address}" in line

    from pagewire.ipc.wire.sockets import CurveKeys

    curve = CurveKeys.load(tmp_path / "alice.key_secret", tmp_path / "core.key")
    engine = LLMEngine.attach(address, curve=curve)
    add_long_requests(engine, 16, 1000)
    core.send_signal(signal.SIGTERM)
    core.send_signal(signal.SIGINT)  # another one: two of a kind that come at once count as one
    tokens: dict[str, int] = {}
    with pytest.raises(EngineDeadError):
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = len(output.outputs[0].token_ids)
    engine.shutdown()
    core.communicate(timeout=60)
    assert core.returncode == 0 and max(tokens.values(), default=0) < 1000


def test_a_signal_while_it_loads(tmp_path: Path) -> None:
    core = start("core", "--listen", f"ipc://{tmp_path}/core.sock", stderr=subprocess.DEVNULL)
    while not (workers := psutil.Process(core.pid).children()):
        assert core.poll() is None
    core.send_signal(signal.SIGTERM)
    out, _ = core.communicate(timeout=60)
    assert (core.returncode, out) == (0, "") and not list(tmp_path.iterdir())
    assert not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--model", "/nowhere/model"], "no model folder /nowhere/model"),
        (["--listen", "tcp://0.0.0.0:0"], "'tcp://0.0.0.0:0' is open to other machines: give CURVE keys"),
        (["--listen", "nonsense"], "'nonsense' must begin with ipc:// or tcp://"),
        (["--curve-secret", "/nowhere/x", "--curve-clients", "/nowhere"], "Invalid certificate file"),
        (["--rights", "/nowhere/rights.yaml"], "[Errno 2] No such file or directory: '/nowhere/rights.yaml'"),
    ],
)
def test_a_failure_is_status_1_and_one_cause(options: list[str], cause: str, tmp_path: Path) -> None:
    done = pagewire("core", "--listen", f"ipc://{tmp_path}/core.sock", *options)
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("E "))
    assert f"engine core failed: {cause}" in error and error == done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_too_few_open_files_are_a_failure_with_the_reason(tmp_path: Path) -> None:
    """ZeroMQ would end a core that has none left for a frontend."""
    command = [*COMMAND, "core", "--listen", f"ipc://{tmp_path}/core.sock"]
    done = subprocess.run(
        ["sh", "-c", 'ulimit -n 40; exec "$@"', "sh", *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "needs at least 128 open files, and this process may have 40" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_the_log_as_json_sums_up_while_there_is_work(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    options = ("--log-format", "json", "--log-stats-interval", "0.2", "--kv-cache-memory-bytes", "16777216")
    core = start_core(address, *options, stderr=subprocess.PIPE)
    assert pagewire("generate", PROMPT, "--attach", address, *SAMPLING).returncode == 0
    assert core.stderr is not None
    records = []
    while not records or not records[-1].get("generation_tokens_per_s"):
        records.append(json.loads(core.stderr.readline()))
    core.terminate()
    records += [json.loads(line) for line in core.communicate(timeout=60)[1].splitlines()]
    stats = [record for record in records if record["message"] == "stats"]
    work = ("running", "waiting", "prompt_tokens_per_s", "generation_tokens_per_s")
    assert all(any(record[name] for name in work) for record in stats)  # nothing when idle
    assert {record["logger"] for record in records} == {
        *("pagewire.core", "pagewire.worker", "pagewire.kernels")
    }
    assert any(record["message"].startswith("generate (pid ") for record in records)
