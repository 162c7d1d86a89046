"""What `pagewire serve` makes of its command line and its file."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli.commands import build_parser
from pagewire.cli.commands.serve import also_options, check_shelf, each_core, take_models, take_server_options
from pagewire.cli.console.models_on_demand import estimated, options_of
from pagewire.cli.console.options import engine_args
from pagewire.cli.console.parser import UsageError
from pagewire.cli.main import main
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.frontend.server.http.uvicorn_server import bind_socket, url_of
from pagewire.ipc.options.engine_args import EngineArgs


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
    with bind_socket(ServerOptions(uds=str(path))) as listening:
        assert url_of(listening, ServerOptions(uds=str(path))) == f"unix:{path}"
        listening.listen()
        assert main(["serve", "demo", "--uds", str(path)]) == 1
    assert "Address already in use" in capsys.readouterr().err
    bind_socket(ServerOptions(uds=str(path))).close()  # it is not any more


def test_urls() -> None:
    for options in (ServerOptions(port=0), ServerOptions(port=0, host="::1")):
        with bind_socket(options) as listening:
            assert url_of(
                listening, options
            ) == f"http://{'[::1]' if ':' in options.host else '127.0.0.1'}:" + str(
                listening.getsockname()[1]
            )


def on_demand(*arguments: str) -> dict[str, Any]:
    """The models of a command line that are loaded on demand, with the model and the longest request of each."""
    models, _ = take_models(build_parser().parse_args(["serve", *arguments]))
    return {name: (args.model, args.max_model_len) for name, args in models.items()}


def test_several_models_are_loaded_on_demand(tmp_path: Path) -> None:
    assert on_demand("demo") == {} == on_demand("demo", "--also", "demo-vision")
    assert on_demand("demo", "demo-vision", "--max-model-len", "64") == {
        "demo": ("demo", 64),
        "demo-vision": ("demo-vision", 64),
    }
    assert on_demand("--model", "demo", "--idle-sleep", "5") == {"demo": ("demo", None)}
    file = tmp_path / "models.yaml"
    file.write_text("small-one: demo\nother:\n  model: demo-vision\n  max-model-len: 32\n")
    assert on_demand("--models", str(file), "--max-model-len", "64") == {
        "small-one": ("demo", 64),
        "other": ("demo-vision", 32),
    }
    config = tmp_path / "server.yaml"
    config.write_text(f"models: {file}\nidle-sleep: 3\nport: 5\nmax-model-len: 16\n")
    options = build_parser().parse_args(["serve", "--config", str(config)])
    models, shelf = take_models(options)
    assert [args.max_model_len for args in models.values()] == [16, 32] and shelf.idle_sleep == 3
    assert take_server_options(options).port == 5
    folder = tmp_path / "models"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "config.json").touch()
    for name in ("b.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "notes.txt"):
        (folder / name).touch()
    found = on_demand("--models-dir", str(folder))
    assert list(found) == ["a", "b", "c"] and found["c"][0].endswith("c-00001-of-00002.gguf")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("demo", "demo"), "two models have the name 'demo'"),
        (("demo", "demo-vision", "--pin", "x"), "no model 'x'"),
        (("demo", "demo-vision", "--also", "x"), "--also has no effect"),
        (("demo", "--idle-sleep", "3", "--attach", "ipc:///x"), "--attach has no effect"),
        (("demo", "demo-vision", "--served-model-name", "x"), "for one model"),
        (("demo", "--idle-sleep", "-1"), "idle_sleep"),
        (("demo", "--models-memory", "much"), "models_memory must be a size"),
        (("demo", "--while-starting", "sing"), "while_starting: one of"),
        (("--models", "/nowhere.yaml"), "cannot read"),
        (("--models-dir", "/nowhere"), "--models-dir"),
        (("--idle-sleep", "3"), "give a MODEL"),
    ],
)
def test_what_cannot_be_loaded_on_demand(arguments: tuple[str, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        on_demand(*arguments)


def test_options_of_one_model_are_refused_for_several() -> None:
    server, options = parsed("demo", "--chat-template", "x")
    check_shelf(server, 1)
    with pytest.raises(UsageError, match="--chat-template is for one model"):
        check_shelf(server, 2)
    assert options.more_models == []


def test_models_that_were_pulled_need_no_other() -> None:
    assert on_demand("--pulled") == {}
    assert on_demand("--pulled", "hf.co/a/b:q4_k_m", "demo", "--pin", "hf:c/d") == {
        "hf:a/b:Q4_K_M": ("hf.co/a/b:q4_k_m", None),
        "demo": ("demo", None),
    }
    options = build_parser().parse_args(["serve", "--pulled", "--max-model-len", "64"])
    assert take_server_options(options, needs_model=False).port == 8000
    args = options_of(options, {"model": "hf:a/b"})
    assert (args.model, args.max_model_len) == ("hf:a/b", 64)
    with pytest.raises(UsageError, match="--attach has no effect"):
        on_demand("--pulled", "--attach", "ipc:///x")


@pytest.mark.parametrize("given", [{"device": "cuda"}, {"device": "cpu", "load_format": "dummy"}])
def test_what_cannot_be_loaded_smaller_is_refused(given: dict[str, str]) -> None:
    estimate = estimated(8 << 30, True, EngineArgs(model="demo", **given))  # type: ignore[arg-type]
    assert estimate.problem is not None and estimate.problem.startswith("--fit is for CPUs")
    assert estimated(8 << 30, False, EngineArgs(model="demo", **given)).problem is None  # type: ignore[arg-type]


def test_a_model_that_fits_is_loaded_as_it_is() -> None:
    args = EngineArgs(model="demo", device="cpu", weight_cache=False)
    estimate = estimated(8 << 30, True, args)
    assert (
        estimate.problem is None and estimate.fitted is not None and estimate.fitted.startswith("as it is: ")
    )
    assert estimate.changes is not None and set(estimate.changes) == {"kv_cache_memory_bytes"}
    too_small = estimated(600 << 20, True, args)
    assert too_small.problem is not None and too_small.problem.endswith("--fit finds nothing smaller")
