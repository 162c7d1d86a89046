"""`pagewire serve` as a process: how it starts, on what it listens, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.conftest import Daemon
from tests.end_to_end.http_server import PATIENCE, Server

LONG = {"prompt": "The", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def metric(server: Server, daemon_address: str, name: str) -> float:
    """A gauge of the core."""
    from pagewire import LLM

    with LLM.attach(daemon_address) as llm:
        return next(m.value for m in llm.get_metrics() if m.name == f"vllm:{name}")  # type: ignore[attr-defined]


def test_a_signal_lets_streams_finish(start_server: Callable[..., Server], address: str) -> None:
    server = start_server("--attach", address, "--port", "0")
    response = server.begin("POST", "/v1/completions", LONG | {"stream": True})
    assert response.readline().startswith(b"data: {")
    server.process.send_signal(signal.SIGTERM)
    events = response.read()
    assert events.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in events
    assert server.process.wait(PATIENCE) == 0
    with pytest.raises(ConnectionRefusedError):
        server.request("GET", "/health")


def test_a_second_signal_does_not(
    start_server: Callable[..., Server], start_daemon: Callable[..., Daemon]
) -> None:
    """Here the request could never finish."""
    daemon = start_daemon()
    server = start_server("--attach", daemon.address, "--port", "0", "--enable-admin")
    assert server.request("POST", "/pause", x_pagewire_admin="1") == (200, {"paused": True})
    waiting = server.connect()
    waiting.request("POST", "/v1/completions", json.dumps(LONG), {"content-type": "application/json"})
    while server.request("GET", "/load")[1]["server_load"] != 1:
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    while True:  # until it has heard the first one
        try:
            server.request("GET", "/health")
        except OSError:
            break
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(PATIENCE) == 0
    waiting.close()


def test_a_client_that_leaves_frees_its_blocks(start_server: Callable[..., Server], address: str) -> None:
    server = start_server("--attach", address, "--port", "0")
    for stream in (True, False):
        connection = server.connect()
        body = json.dumps(LONG | {"stream": stream, "n": 16, "logprobs": 20})  # seconds of work
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        while metric(server, address, "num_requests_running") == 0:
            time.sleep(0.01)
        connection.close()
        while metric(server, address, "num_requests_running"):
            time.sleep(0.01)
        assert metric(server, address, "kv_cache_usage_perc") == 0
    server.wait_for_log('error="the client left"', times=2)


def test_a_client_that_reads_nothing_is_dropped(start_server: Callable[..., Server], address: str) -> None:
    """Its connection is cut by the kernel; what it requested is not generated to the end."""
    server = start_server("--attach", address, "--port", "0", "--stall-seconds", "0.5")
    body = json.dumps(LONG | {"stream": True, "n": 32, "logprobs": 20}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        client.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        server.wait_for_log("status=499")
    assert server.request("GET", "/load")[1] == {"server_load": 0}


def test_the_core_is_killed(start_server: Callable[..., Server], start_daemon: Callable[..., Daemon]) -> None:
    """One server ends, with the status of a failure; one that is to keep alive goes on."""
    daemon = start_daemon()
    options = ("--attach", daemon.address, "--port", "0", "--reattach-timeout", "0.5")
    ending, staying = start_server(*options), start_server(*options, "--keep-alive-on-engine-death")
    responses = [one.begin("POST", "/v1/completions", LONG | {"stream": True}) for one in (ending, staying)]
    for response in responses:
        assert response.readline().startswith(b"data: {")
    daemon.process.kill()
    daemon.process.wait()
    for response in responses:
        *_, error, done, nothing = response.read().split(b"\n\n")
        assert json.loads(error.strip().removeprefix(b"data: "))["error"]["code"] == "engine_down"
        assert (done, nothing) == (b"data: [DONE]", b"")
    assert ending.process.wait(PATIENCE) == 1
    assert "pagewire serve: the engine core closed the connection" in ending.log.splitlines()[-1]
    assert staying.request("GET", "/health")[0] == 503
    status, answer = staying.request("POST", "/v1/completions", LONG)
    assert status == 503 and answer["error"]["type"] == "service_unavailable_error"
    assert staying.stop() == 0


def test_a_queue_that_is_full(
    start_server: Callable[..., Server], start_daemon: Callable[..., Daemon]
) -> None:
    daemon = start_daemon("--max-waiting", "2")
    server = start_server("--attach", daemon.address, "--port", "0")
    with server.begin("POST", "/v1/completions", LONG | {"n": 3}) as response:
        assert (response.status, response.getheader("retry-after")) == (429, "1")
        assert json.loads(response.read())["error"]["code"] == "engine_busy"
    assert server.request("POST", "/v1/completions", {"prompt": "The", "n": 2})[0] == 200


def test_a_unix_socket_and_a_config_file(
    start_server: Callable[..., Server], address: str, tmp_path: Path
) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(f"uds: {tmp_path}/http.sock\napi-key: [secret]\nresponse_role: bot\nlog-format: json\n")
    options = ("--attach", address, "--config", str(config), "--response-role", "assistant")
    server = start_server(*options)
    assert server.url == f"unix:{tmp_path}/http.sock"
    assert server.request("GET", "/v1/models")[0] == 401
    question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    status, answer = server.request("POST", "/v1/chat/completions", question, authorization="Bearer secret")
    assert status == 200 and answer["choices"][0]["message"]["role"] == "assistant"
    server.wait_for_log(answer["id"])
    facts = json.loads(server.log.splitlines()[-1])
    assert facts["id"] == answer["id"] and facts["tokens_out"] == 2
    server.process.kill()
    server.process.wait()
    again = start_server(*options)  # the dead one's socket is no hindrance
    assert again.request("GET", "/health")[0] == 200


def test_tls(start_server: Callable[..., Server], address: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    files = ("--ssl-keyfile", str(key), "--ssl-certfile", str(certificate))
    server = start_server("--attach", address, "--port", "0", *files)
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    with urllib.request.urlopen(f"{server.url}/version", context=context, timeout=PATIENCE) as response:
        assert json.load(response)["version"]


def test_two_servers_on_one_core(start_server: Callable[..., Server], address: str) -> None:
    """One is killed under load; the other's answers are what they were."""
    doomed, other = (start_server("--attach", address, "--port", "0") for _ in range(2))
    body = LONG | {"max_tokens": 200}
    expected = other.request("POST", "/v1/completions", body)[1]["choices"][0]["text"]
    streams = [doomed.begin("POST", "/v1/completions", LONG | {"stream": True}) for _ in range(4)]
    answers: list[Any] = []
    ask = [
        threading.Thread(target=lambda: answers.append(other.request("POST", "/v1/completions", body)))
        for _ in range(4)
    ]
    for thread in ask:
        thread.start()
    doomed.process.kill()
    for thread in ask:
        thread.join(PATIENCE)
    assert [answer["choices"][0]["text"] for _, answer in answers] == [expected] * 4
    for stream in streams:
        stream.close()
