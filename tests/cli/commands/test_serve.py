"""What `pagewire serve` makes of its command line and its file."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.commands import build_parser
from pagewire.cli.commands.serve import also_options, each_core, take_server_options
from pagewire.cli.console.options import engine_args
from pagewire.cli.main import main
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.uvicorn_server import bound, url_of


def parsed(*arguments: str) -> tuple[ServerOptions, argparse.Namespace]:
    """The server's options, and what is left for the engine."""
    options = build_parser().parse_args(["serve", *arguments])
    return take_server_options(options), options


def test_options_of_server_and_engine() -> None:
    server, options = parsed(
        "demo", "--port", "0", "--api-key", "a", "b", "--api-key", "c", "--max-num-seqs", "4"
    )
    assert (server.port, server.api_key, server.host) == (0, ["a", "b", "c"], "127.0.0.1")
    args = engine_args(options)
    assert (args.model, args.max_num_seqs) == ("demo", 4)
    assert engine_args(parsed("--model", "demo", "--served-model-name", "x", "y")[1]).served_names() == [
        "x",
        "y",
    ]
    assert parsed("demo", "--allowed-methods", '["GET", "POST"]')[0].allowed_methods == ["GET", "POST"]
    assert parsed("demo")[0] == ServerOptions()


def test_the_file_stands_behind_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(
        "host: 1.2.3.4\nport: 6379\nuvicorn-log-level: error\nmax_num_seqs: 3\nmodel: demo\nswap-space: 9\n"
    )
    server, options = parsed("--config", str(config), "--port", "1")
    assert (server.host, server.port, server.uvicorn_log_level) == ("1.2.3.4", 1, "error")
    assert (engine_args(options).model, engine_args(options).max_num_seqs) == ("demo", 3)
    config.write_text("port: 5\n")
    server, options = parsed("--config", str(config), "--attach", "ipc:///x")
    assert server.port == 5 and options.config is None


def test_further_models() -> None:
    _, options = parsed("demo", "--also", "other", "--also", '{"model": "third", "dtype": "float32"}')
    args = [engine_args(own) for own in (*each_core(options), *map(also_options, options.also))]
    assert [(own.model, own.dtype) for own in args] == [
        ("demo", "auto"),
        ("other", "auto"),
        ("third", "float32"),
    ]
    _, options = parsed("--attach", "ipc:///a", "--attach", "ipc:///b")
    assert [own.attach for own in each_core(options)] == ["ipc:///a", "ipc:///b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a MODEL"),
        (("demo", "--model", "demo"), "not both"),
        (("demo", "--port", "70000"), "port must be"),
        (("demo", "--port", "x"), "invalid int"),
        (("demo", "--ssl-certfile", "x"), "ssl_keyfile"),
        (("demo", "--root-path", "llm"), "root_path"),
        (("demo", "--enable-auto-tool-choice", "--tool-call-parser", "none"), "tool_call_parser"),
        (("demo", "--tool-call-parser", "other"), "hermes"),
        (("demo", "--hots", "x"), "did you mean '--host'"),
        (("demo", "--config", "/nowhere.yaml"), "cannot read"),
        (("demo", "--allowed-origins", "[1"), "allowed_origins"),
        (("--attach", "ipc:///nowhere", "--port", "0", "--dtype", "float32"), "no effect with --attach"),
        (("demo", "--also", "{"), "not valid JSON"),
        (("demo", "--also", '{"dtype": "float32"}'), "a model is missing"),
        (("demo", "--also", '{"model": "x", "dtipe": "float32"}'), "dtipe"),
        (("--attach", "ipc:///nowhere", "--port", "0", "--restarts", "1"), "no effect with --attach"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str, capsys: Any) -> None:
    """Told in one line, with their status."""
    try:
        status = main(["serve", *arguments])
    except SystemExit as error:
        status = int(str(error.code))
    errors = capsys.readouterr().err
    assert status == 2 and message in errors and len(errors.splitlines()) == 1


def test_mistakes_in_the_file(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "bad.yaml"
    for text, message in (
        ("hots: x", "hots"),
        ("port: x", "port"),
        ("dtype: x", "dtype"),
        ("api-key: x", "api_key"),
    ):
        config.write_text(text)
        assert main(["serve", "demo", "--config", str(config)]) == 2
        assert message in capsys.readouterr().err


def test_an_address_in_use(tmp_path: Path, capsys: Any) -> None:
    """Told before a model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "demo", "--port", str(taken.getsockname()[1])]) == 1
    assert "Address already in use" in capsys.readouterr().err
    path = tmp_path / "x.sock"
    with bound(ServerOptions(uds=str(path))) as listening:
        assert url_of(listening, ServerOptions(uds=str(path))) == f"unix:{path}"
        listening.listen()
        assert main(["serve", "demo", "--uds", str(path)]) == 1
    assert "Address already in use" in capsys.readouterr().err
    bound(ServerOptions(uds=str(path))).close()  # it is not any more


def test_urls() -> None:
    for options in (ServerOptions(port=0), ServerOptions(port=0, host="::1")):
        with bound(options) as listening:
            assert url_of(
                listening, options
            ) == f"http://{'[::1]' if ':' in options.host else '127.0.0.1'}:" + str(
                listening.getsockname()[1]
            )
