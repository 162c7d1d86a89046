"""The commands that do something and end, as their users type them, on the demo model."""

from __future__ import annotations

import errno
import json
import os
import pty
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pagewire.frontend.server.http.key_file import Rights, key_digest, read_key_file
from pagewire.frontend.text.tokenizer import load_tokenizer
from tests.cli.command import COMMAND, ENDLESS, ENVIRONMENT, PROMPT, SAMPLING, pagewire, start

# Runs a command and prints which heavy modules it has loaded.
WEIGHED = """
import sys
from pagewire.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as end:
    status = end.code
print("HEAVY", {"torch", "transformers", "numpy"} & set(sys.modules), status)
"""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        *(
            (f"{command} --help", 0)
            for command in (
                *("", "generate", "chat", "core", "bench", "bench latency", "bench throughput"),
                *("embed", "rerank", "quantize", "keys", "collect-env", "doctor", "kernels", "kernels build"),
            )
        ),
        ("--version", 0),
        ("generate x --max-modellen 5", 2),
        ("generate --file /nowhere/x", 2),
        ("generate x --attach nonsense", 1),
        ("embed /nowhere/x", 2),
        ("rerank query /nowhere/x", 2),
        ("core --listen nonsense", 1),
        ("core --config /nowhere/x", 2),
        ("collect-env", 0),
    ],
)
def test_help_and_mistakes_load_nothing_heavy(command: str, status: int) -> None:
    arguments = [sys.executable, "-c", WEIGHED, *command.split()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith(f"HEAVY set() {status}\n")
    if "--help" in command:
        assert done.stdout.startswith(f"usage: pagewire {command.removesuffix('--help').lstrip()}")
        assert not done.stderr
    if status:
        assert len(done.stderr.splitlines()) == 1


def test_a_prompt_from_everywhere(address: str, expected: str, tmp_path: Path) -> None:
    attach = ["--attach", address, *SAMPLING]
    (tmp_path / "prompt.txt").write_text(PROMPT)
    for done in (
        pagewire("generate", PROMPT, *attach),
        pagewire("generate", *attach, stdin=PROMPT),
        pagewire("generate", "-", *attach, stdin=PROMPT),
        pagewire("generate", "--file", str(tmp_path / "prompt.txt"), *attach),
    ):
        assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")


def test_an_engine_of_its_own_logs_to_standard_error(expected: str) -> None:
    environment = ENVIRONMENT | {"PAGEWIRE_LOGGING_LEVEL": "INFO"}
    done = pagewire("generate", PROMPT, *SAMPLING, "--dtype", "float32", env=environment)
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    assert "engine ready: demo" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["generate", "x", "--file", "y"], 2, "not both"),
        (["generate", "--file", "/nowhere/x"], 2, "cannot read /nowhere/x"),
        (["generate"], 1, "the prompt is empty"),
        (["generate", "a" * 100_000], 1, "max_model_len is 1024"),
        (["generate", "x", "--curve-secret", "/nowhere/x", "--curve-server", "y"], 1, "/nowhere/x"),
        (["bench", "latency", "--input-len", "1000", "--output-len", "25"], 2, "exceed max_model_len=1024"),
    ],
)
def test_mistakes_are_reported_in_a_line(arguments: list[str], status: int, text: str, address: str) -> None:
    done = pagewire(*arguments, "--attach", address)
    assert (done.returncode, done.stdout) == (status, "")
    assert text in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_missing_model_is_reported_at_the_end() -> None:
    done = pagewire("generate", "x", "--model", "/nowhere/model")
    assert (done.returncode, done.stdout) == (1, "") and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "pagewire generate: no model folder /nowhere/model"


def test_no_prompt_in_a_terminal_or_anywhere(address: str) -> None:
    ours, theirs = pty.openpty()
    try:
        in_terminal = start("generate", "--attach", address, stdin=theirs)
        out, err = in_terminal.communicate(timeout=60)
        assert (in_terminal.returncode, out) == (2, "") and err.startswith("pagewire generate: give a prompt")
    finally:
        os.close(ours)
        os.close(theirs)
    command = ["sh", "-c", '"$@" <&-', "sh", *COMMAND, "generate", "--attach", address]
    closed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (closed.returncode, closed.stdout, closed.stderr) == (2, "", err)


def test_a_closed_pipe_ends_it_quietly(address: str) -> None:
    process = start("generate", PROMPT, "--attach", address, *ENDLESS)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 128 + signal.SIGPIPE
    process.stderr.close()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["collect-env"]])
def test_output_that_is_not_read_or_cannot_be_written(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = pagewire(*arguments, capture_output=False, stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
    with Path("/dev/full").open("wb") as full:
        done = pagewire(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1 and os.strerror(errno.ENOSPC) in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("loaded", [False, True])
def test_ctrl_c_ends_it_quietly_with_its_engine(loaded: bool) -> None:
    process = start("generate", PROMPT, "--max-tokens", "1000", "--ignore-eos", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    me = psutil.Process(process.pid)
    if loaded:
        assert process.stdout.read(1)
    while len(family := me.children(recursive=True)) < 2:  # while the worker imports torch
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "") and len(family) >= 2
    assert loaded or out == ""
    assert not psutil.wait_procs(family, timeout=60)[1]


def test_bench_prints_a_table(address: str) -> None:
    sizes = ["--input-len", "4", "--output-len", "2", "--num-runs", "2"]
    done = pagewire("bench", "throughput", "--attach", address, *sizes)
    begin, head, *rows = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "") and begin.startswith("started in ")
    assert head.split()[:3] == ["run", "seconds", "tokens/s"]
    assert [row.split()[0] for row in rows] == ["1", "2", "median"] and all(
        len(row.split()) == 5 for row in rows
    )


def test_bench_prints_json(address: str, tmp_path: Path) -> None:
    path, turns = tmp_path / "sharegpt.json", [{"value": "def f(x):\n"}, {"value": "    return x\n"}]
    path.write_text(json.dumps([{"conversations": turns}]))
    num_out = len(load_tokenizer("demo").encode(turns[1]["value"]))
    for kind, count in (("latency", 1), ("throughput", 32)):
        sizes = ["--input-len", "4", "--output-len", str(num_out), "--num-runs", "2"]
        sizes = ["--dataset-path", str(path), "--num-runs", "2"] if kind == "throughput" else sizes
        done = pagewire("bench", kind, "--json", "--attach", address, *sizes)
        begin, *runs, median = (json.loads(line) for line in done.stdout.splitlines())
        assert (done.returncode, done.stderr, len(runs)) == (0, "", 2) and set(begin) == {"start_s"}
        assert set(median["median"]) == set(runs[0]) == set(runs[1])
        for run in runs:
            assert min(run.values()) > 0
            tokens = run["output_tokens_per_s"] * run["seconds"]
            assert tokens == pytest.approx(num_out * count, rel=0.05)  # both figures are rounded


def test_keys_are_not_made_where_others_could_replace_them(tmp_path: Path) -> None:
    (folder := tmp_path / "keys").mkdir()
    folder.chmod(0o777)
    done = pagewire("keys", str(folder), "core")
    assert done.returncode == 2 and "open to other users" in done.stderr
    assert not list(folder.iterdir())


def test_api_keys_are_added_to_a_file(tmp_path: Path) -> None:
    """The file has their hash only, and is one that a server takes."""
    file = tmp_path / "api-keys"
    first = pagewire("keys", str(file), "alice", "--api", "--max-requests", "4", "--admin")
    assert first.returncode == 0 and stat.S_IMODE(file.stat().st_mode) == 0o600
    again = pagewire("keys", str(file), "alice", "--api", "--max-requests", "4", "--admin")
    other = pagewire("keys", str(file), "bob", "--api")
    keys = [done.stdout.split()[1] for done in (first, again, other)]
    entries = read_key_file(str(file))
    assert [entry.name for entry in entries] == ["alice", "alice", "bob"]
    assert [entry.digest for entry in entries] == [key_digest(key.encode()) for key in keys]
    assert entries[0].rights == entries[1].rights == Rights(max_requests=4, admin=True)
    assert not any(key in file.read_text() for key in keys)
    for words, reason in (
        (("bob", "--api", "--admin"), "other rights"),
        (("a b", "--api"), "tenant's name"),
        (("bob", "--api", "--max-tokens", "0"), "max_tokens must be"),
        (("bob", "--admin"), "give --api"),
    ):
        done = pagewire("keys", str(file), *words)
        assert done.returncode == 2 and reason in done.stderr
    file.chmod(0o644)
    assert "chmod 600" in pagewire("keys", str(file), "carol", "--api").stderr
    assert len(file.read_text().splitlines()) == 3


def test_keys_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    done = pagewire("keys", str(folder), "core")
    public, secret = folder / "core.key", folder / "core.key_secret"
    assert (done.returncode, done.stdout) == (0, f"public: {public}\nsecret: {secret}\n")
    modes = [path.stat().st_mode & 0o777 for path in (folder, public, secret)]
    assert modes == [0o700, 0o644, 0o600]
    assert "secret-key" in secret.read_text() and "secret-key" not in public.read_text()
    before = secret.read_bytes()
    public.unlink()  # any of the two is reason enough
    for name, text in (
        ("core", f"{secret} exists"),
        ("../core", "must not be a path"),
        ("", "not be a path"),
    ):
        done = pagewire("keys", str(folder), name)
        assert (done.returncode, done.stdout) == (2, "") and text in done.stderr
    assert secret.read_bytes() == before and list(folder.iterdir()) == [secret]


def test_what_the_environment_is() -> None:
    environment = ENVIRONMENT | {
        "PAGEWIRE_LOGGING_LEVEL": "ERROR",
        "PAGEWIRE_CPU_ISA": "reference",  # any other than the best would be compiled for this test
        "OMP_NUM_THREADS": "3",
        "HF_TOKEN": "hf_hidden",
        "PAGEWIRE_API_KEY": "hidden",
        "UNRELATED": "hidden",
    }
    done = pagewire("collect-env", env=environment)
    assert (done.returncode, done.stderr) == (0, "") and "hidden" not in done.stdout
    facts = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    for name in ("pagewire", "torch", "pyzmq", "msgspec", "transformers"):
        assert facts[name][0].isdigit(), name
    assert sys.executable in facts["python"] and "usable" in facts["cores"]
    assert facts["kernels"] == "none: torch is used instead"
    assert (facts["PAGEWIRE_LOGGING_LEVEL"], facts["OMP_NUM_THREADS"]) == ("ERROR", "3")


COMPLETED = """
source /dev/stdin
complete -p pagewire > /dev/null || exit 1
function words {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_pagewire pagewire "${@: -1}" x; echo "${COMPREPLY[@]}"
}
words pagewire ch
words pagewire serve --max-num-b
words pagewire completion z
"""


def test_a_shell_completes_commands_options_and_values() -> None:
    made = {shell: pagewire("completion", shell) for shell in ("bash", "zsh", "fish")}
    assert all(done.returncode == 0 and "max-num-batched-tokens" in done.stdout for done in made.values())
    shell = subprocess.run(
        ["bash", "-c", COMPLETED], input=made["bash"].stdout, capture_output=True, text=True, timeout=60
    )
    assert shell.returncode == 0, shell.stderr
    assert shell.stdout.split() == ["chat", "--max-num-batched-tokens", "zsh"]
    for option in ("file", "model", "chat-template"):
        (line, *_) = (line for line in made["fish"].stdout.splitlines() if f" -l {option} " in line)
        assert "__fish_complete_path" in line
    assert "__fish_complete_directories" in made["fish"].stdout


@pytest.mark.parametrize("plain", [False, True])
def test_errors_are_red_on_a_terminal(plain: bool) -> None:
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    environment |= {"NO_COLOR": "1"} if plain else {}
    command = [*COMMAND, "generate", "--file", "/there/is/none"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment)
    os.close(theirs)
    assert process.wait(60) == 2
    said = os.read(ours, 4096).decode()
    os.close(ours)
    assert said.startswith("pagewire generate: " if plain else "\x1b[1;31mpagewire generate:\x1b[0m "), said
    assert said.count("\n") == 1
