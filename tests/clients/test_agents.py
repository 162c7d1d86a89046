"""Agents from npm, which change files as the script of `scripted_server.py` says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.clients.scripts import call, script

PACKAGES = Path(__file__).parent / "agents" / "node_modules"
CODEX = PACKAGES / "@openai" / "codex" / "bin" / "codex.js"
CLAUDE_CODE = PACKAGES / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
QWEN_CODE = PACKAGES / "@qwen-code" / "qwen-code" / "cli-entry.js"
OPENCODE = "opencode-linux-*/bin/opencode"  # a program, in a package for each kind of processor
DONE = "All is done."
ADD = '*** Begin Patch\n*** Add File: one.txt\n+one\n+say "hi"\n*** End Patch\n'
UPDATE = '*** Begin Patch\n*** Update File: one.txt\n@@\n one\n-say "hi"\n+two\n*** End Patch\n'
CODE = """\
const first = await tools.exec_command({cmd: "echo one > one.txt"});
const second = await tools.exec_command({cmd: "echo two >> one.txt"});
const third = await tools.exec_command({cmd: "cat one.txt"});
text(third.output);
"""


def run(folder: Path, *command: str, **variables: str) -> str:
    """Run an agent in a folder that is its own, and return what it prints."""
    if command[0].endswith("js"):
        node = shutil.which("node")
        assert node is not None, "`make test-clients` installs it"
        command = (node, *command)
    (folder / "home").mkdir()
    (folder / "work").mkdir()
    done = subprocess.run(
        command,
        cwd=folder / "work",
        env=os.environ
        | {"HOME": str(folder / "home"), "CODEX_HOME": str(folder / "home"), "PWD": str(folder / "work")}
        | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def codex(folder: Path, url: str, model: str, *replies: str | dict[str, Any], more: str = "") -> str:
    """Run Codex as docs/clients.md says. more: fields of the provider."""
    provider = f'{{name="pagewire", base_url="{url}/v1", wire_api="responses"{more}}}'
    return run(
        folder,
        str(CODEX),
        *("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "--model", model),
        *("-c", "model_provider=pagewire", "-c", f"model_providers.pagewire={provider}"),
        script("Work.", *replies),
    )


@pytest.mark.parametrize(
    ("model", "replies"),
    [
        (
            "demo",
            [
                call("exec_command", cmd="echo one > one.txt"),
                call("exec_command", cmd="cat one.txt"),
                call("exec_command", cmd="echo two >> one.txt"),
            ],
        ),
        (  # it has a custom tool with a grammar for models of this name
            "gpt-5.5",
            [
                call("apply_patch", input=ADD),
                call("exec_command", cmd="cat one.txt"),
                call("apply_patch", input=UPDATE),
            ],
        ),
        ("gpt-6.1-sol", [call("functions.exec", input=CODE)]),  # and code for this one, in a namespace
    ],
    ids=["functions", "custom", "namespaces"],
)
def test_codex(scripted: str, tmp_path: Path, model: str, replies: list[dict[str, Any]]) -> None:
    said = codex(tmp_path, scripted, model, *replies, DONE)
    assert DONE in said
    assert (tmp_path / "work" / "one.txt").read_text() == "one\ntwo\n"


def sockets_opened(url: str) -> int:
    """How many WebSockets that have ended a server accepted for /v1/responses."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r'http_requests_total{handler="/v1/responses",method="GET",status="1xx"} (\S+)', text)
    return 0 if found is None else int(float(found[1]))


def test_codex_over_a_websocket(scripted: str, tmp_path: Path) -> None:
    """It warms a connection up, and sends what is new alone."""
    calls = [call("exec_command", cmd=f"echo {word} >> one.txt") for word in ("one", "two", "three")]
    before = sockets_opened(scripted)
    said = codex(tmp_path, scripted, "demo", *calls, DONE, more=", supports_websockets=true")
    assert DONE in said
    assert (tmp_path / "work" / "one.txt").read_text() == "one\ntwo\nthree\n"
    assert sockets_opened(scripted) > before


def test_codex_as_with_ollama(scripted: str, tmp_path: Path) -> None:
    """It asks for Ollama's version and models first; nothing is configured."""
    options = ("--oss", "--local-provider", "ollama", "--model", "demo", "--sandbox", "danger-full-access")
    task = script("Work.", call("exec_command", cmd="echo one > one.txt"), DONE)
    said = run(
        tmp_path,
        str(CODEX),
        "exec",
        "--skip-git-repo-check",
        *options,
        task,
        CODEX_OSS_BASE_URL=f"{scripted}/v1",
    )
    assert DONE in said and (tmp_path / "work" / "one.txt").read_text() == "one\n"


def test_claude_code(scripted: str, tmp_path: Path) -> None:
    file = str(tmp_path / "work" / "one.txt")
    task = script(
        "Work.",
        call("Write", file_path=file, content="one\ntwo\n"),
        call("Edit", file_path=file, old_string="two", new_string="three"),
        call("Bash", command="cp one.txt copy.txt", description="Copies a file"),
        f"I see.</think>{DONE}",
    )
    said = run(
        tmp_path,
        str(CLAUDE_CODE),
        *("-p", task, "--permission-mode", "acceptEdits", "--allowedTools", "Bash,Write,Edit"),
        ANTHROPIC_BASE_URL=scripted,
        ANTHROPIC_AUTH_TOKEN="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )
    assert DONE in said
    for name in ("one.txt", "copy.txt"):
        assert (tmp_path / "work" / name).read_text() == "one\nthree\n"


def test_opencode(scripted: str, tmp_path: Path) -> None:
    program = sorted(path for path in PACKAGES.glob(OPENCODE) if "musl" not in str(path))[-1]
    file = str(tmp_path / "work" / "one.txt")
    task = script(
        "Work.",
        call("write", filePath=file, content="one\ntwo\n"),
        call("edit", filePath=file, oldString="two", newString="three"),
        call("bash", command="cp one.txt copy.txt", description="Copies a file"),
        DONE,
    )
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{scripted}/v1"},
        "models": {"demo": {}},
    }
    said = run(
        tmp_path,
        *(str(program), "run", "--model", "pagewire/demo", task),
        OPENCODE_CONFIG_CONTENT=json.dumps({"provider": {"pagewire": provider}}),
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert DONE in said
    for name in ("one.txt", "copy.txt"):
        assert (tmp_path / "work" / name).read_text() == "one\nthree\n"


def test_qwen_code(scripted: str, tmp_path: Path) -> None:
    file = str(tmp_path / "work" / "one.txt")
    task = script(
        "Work.",
        call("write_file", file_path=file, content="one\ntwo\n"),
        call("edit", file_path=file, old_string="two", new_string="three"),
        call(
            "run_shell_command",
            command="cp one.txt copy.txt",
            description="Copies a file",
            is_background=False,
        ),
        DONE,
    )
    said = run(
        tmp_path,
        *(str(QWEN_CODE), "--yolo", "--auth-type", "openai", "-p", task),
        OPENAI_BASE_URL=f"{scripted}/v1",
        OPENAI_API_KEY="none",
        OPENAI_MODEL="demo",
    )
    assert DONE in said
    for name in ("one.txt", "copy.txt"):
        assert (tmp_path / "work" / name).read_text() == "one\nthree\n"
