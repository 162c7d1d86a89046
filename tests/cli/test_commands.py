"""The `pagewire` command as its users type it, on the demo model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewire import LLM, SamplingParams

COMMAND = [sys.executable, "-m", "pagewire.cli.main"]
PROMPT = 'The "with" statement is used to'
SAMPLING = ["--temperature", "0", "--max-tokens", "12"]


def pagewire(*arguments: str, stdin: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=120, **options
    )


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running core's address and process."""
    address = f"ipc://{tmp_path_factory.mktemp('cli')}/core.sock"
    command = [*COMMAND, "core", "--listen", address, "--dtype", "float32"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"ready {address}\n"
    yield address, process
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def expected(daemon: tuple[str, subprocess.Popen[str]]) -> str:
    with LLM.attach(daemon[0]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("command", ["", "generate", "chat", "core", "bench latency", "keys", "collect-env"])
def test_help_is_quick_and_whole(command: str) -> None:
    program = (
        "import sys; from pagewire.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: print('HEAVY', {'torch', 'transformers', 'numpy'} & set(sys.modules), end.code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split(), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("usage: pagewire") and done.stdout.endswith("HEAVY set() 0\n")
    if command in ("generate", "chat", "core", "bench latency"):
        for title in ("Model options:", "Scheduler options:", "--config FILE", "--max-model-len INT"):
            assert title in done.stdout, title


def test_a_prompt_from_everywhere(
    daemon: tuple[str, subprocess.Popen[str]], expected: str, tmp_path: Path
) -> None:
    attach = ["--attach", daemon[0], *SAMPLING]
    (tmp_path / "prompt.txt").write_text(PROMPT)
    for done in (
        pagewire("generate", PROMPT, *attach),
        pagewire("generate", *attach, stdin=PROMPT),
        pagewire("generate", "-", *attach, stdin=PROMPT),
        pagewire("generate", "--file", str(tmp_path / "prompt.txt"), *attach),
    ):
        assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_an_engine_of_its_own(expected: str) -> None:
    done = pagewire("generate", PROMPT, *SAMPLING, "--dtype", "float32")
    assert (done.returncode, done.stdout) == (0, expected + "\n")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["generate", "x", "--file", "y"], 2, "not both"),
        (["generate", "--file", "/nowhere/x"], 2, "cannot read /nowhere/x"),
        (["generate", "x", "--max-modellen", "5"], 2, "--max-model-len"),
        (["generate", "x", "--tensor-parallel-size", "2"], 2, "not supported yet"),
        (["generate", "x", "--config", "/nowhere/x.yaml"], 2, "cannot read /nowhere/x.yaml"),
        (["generate", "x", "--model", "/nowhere/model"], 1, "/nowhere/model"),
        (["core", "--listen", "tcp://0.0.0.0:0"], 1, "give CURVE keys"),
        (["core", "--listen", "nonsense"], 1, "'nonsense' must begin with"),
        (["core", "--dtype", "float8"], 2, "float8"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: list[str], status: int, text: str) -> None:
    done = pagewire(*arguments)
    assert done.returncode == status and text in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_file_of_options_stands_behind_the_command_line(
    daemon: tuple[str, subprocess.Popen[str]], tmp_path: Path
) -> None:
    from pagewire.cli.main import build_parser
    from pagewire.cli.options import UsageError, engine_args

    def parsed(*arguments: str) -> Any:
        return engine_args(build_parser().parse_args(["core", "--config", str(path), *arguments]))

    path = tmp_path / "engine.yaml"
    path.write_text(
        "max-num-seqs: 7\nmax_model_len: 99\nenable-prefix-caching: false\nhf-overrides: {a: 1}\n"
    )
    args = parsed("--max-model-len", "50")
    assert (args.max_num_seqs, args.max_model_len, args.enable_prefix_caching) == (7, 50, False)
    assert args.hf_overrides == {"a": 1} and args.block_size == parsed().block_size
    assert parsed("--enable-prefix-caching").enable_prefix_caching is True
    for text, message in (
        ("max_modellen: 5", "max_model_len"),
        ("- a list", "must hold a mapping"),
        ("a: [", "cannot read"),
        ("max_num_seqs: many", "max_num_seqs"),
    ):
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            parsed()


def test_a_conversation(daemon: tuple[str, subprocess.Popen[str]]) -> None:
    lines = "What is the with statement?\n\n/reset\nWhat is the with statement?\n/exit\nnever asked\n"
    done = pagewire("chat", "--attach", daemon[0], *SAMPLING, stdin=lines)
    assert done.returncode == 0 and done.stderr == ""
    with LLM.attach(daemon[0]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        asked = [{"role": "user", "content": "What is the with statement?"}]
        answer = llm.chat(asked, params, use_tqdm=False)[0].outputs[0].text
    assert done.stdout.count(answer) == 2 and "never" not in done.stdout


def test_a_closed_pipe_ends_it_quietly(daemon: tuple[str, subprocess.Popen[str]]) -> None:
    command = [*COMMAND, "generate", PROMPT, "--attach", daemon[0], "--max-tokens", "900", "--ignore-eos"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait(60) == 141
    process.stderr.close()


def test_ctrl_c_ends_it_quietly_with_its_engine() -> None:
    command = [
        *COMMAND,
        "generate",
        PROMPT,
        "--max-tokens",
        "100000",
        "--ignore-eos",
        "--max-model-len",
        "1000",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"") and len(family) == 2
    assert not psutil.wait_procs(family, timeout=60)[1]


def test_a_core_takes_over_a_dead_ones_socket_and_drains(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    command = [*COMMAND, "core", "--listen", address]
    for how in (signal.SIGKILL, signal.SIGTERM):
        core = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert core.stdout is not None and core.stdout.readline() == f"ready {address}\n"
        if how == signal.SIGTERM:  # what runs is finished first
            with LLM.attach(address) as llm:
                llm.llm_engine.add_request("r", PROMPT, SamplingParams(max_tokens=300, ignore_eos=True))
                assert llm.llm_engine.step()
                core.send_signal(how)
                while llm.llm_engine.has_unfinished_requests():
                    outputs = llm.llm_engine.step()
                assert len(outputs[0].outputs[0].token_ids) == 300
        core.send_signal(how)
        core.stdout.close()
        assert core.wait(60) == (0 if how == signal.SIGTERM else -signal.SIGKILL)


def test_bench_prints_json(daemon: tuple[str, subprocess.Popen[str]]) -> None:
    for kind in ("latency", "throughput"):
        sizes = ["--num-prompts", "2", "--input-len", "4", "--output-len", "5", "--num-runs", "2"]
        done = pagewire("bench", kind, "--attach", daemon[0], *sizes)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 0 and len(lines) == 4
        assert lines[-1]["median"]["output_tokens_per_s"] > 0 and lines[1]["ttft_ms"] > 0


def test_what_the_environment_is() -> None:
    done = pagewire("collect-env", env={**os.environ, "PAGEWIRE_LOGGING_LEVEL": "INFO"})
    assert done.returncode == 0
    for name in ("pagewire", "torch", "pyzmq", "msgspec", "transformers"):
        assert name in done.stdout
