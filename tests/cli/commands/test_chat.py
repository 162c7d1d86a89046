"""`pagewire chat`, over a pipe and in a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire import LLM, SamplingParams
from pagewire.cli.chat.conversation import HELP
from pagewire.cli.commands.chat import INTRODUCTION
from tests.cli.command import ENDLESS, ENVIRONMENT, QUESTION, SAMPLING, pagewire, start

# Makes standard input the terminal that Ctrl-C and Ctrl-D are typed into.
IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pagewire.cli.main import main
sys.exit(main())
"""


def answers(address: str, *questions: str, system: str | None = None) -> list[str]:
    """What `LLM.chat` answers to one question after the other."""
    messages = [{"role": "system", "content": system}] if system else []
    with LLM.attach(address) as llm:
        for question in questions:
            messages.append({"role": "user", "content": question})
            output = llm.chat([messages], SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
            messages.append({"role": "assistant", "content": output[0].outputs[0].text})
    return [message["content"] for message in messages if message["role"] == "assistant"]


def test_turns_build_on_each_other_until_reset(address: str) -> None:
    again = "And what else?"
    first, second = answers(address, QUESTION, again)
    (anew,) = answers(address, again)
    assert second != anew, "the first turn must matter for this to show anything"
    lines = f"{QUESTION}\n\n{again}\n/reset\n{again}\n/exit\nnever asked\n"
    done = pagewire("chat", "--attach", address, *SAMPLING, stdin=lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"demo: {INTRODUCTION}\n> {first}\n> > {second}\n> > {anew}\n> "


def test_end_of_file_ends_it_and_the_system_prompt_is_sent(address: str) -> None:
    (answer,) = answers(address, QUESTION, system="Answer in Latin.")
    arguments = ["chat", "--attach", address, *SAMPLING, "--system", "Answer in Latin."]
    done = pagewire(*arguments, stdin=f"/reset\n{QUESTION}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"demo: {INTRODUCTION}\n> > {answer}\n> \n"


def test_a_question_that_is_refused_is_forgotten(address: str) -> None:
    (answer,) = answers(address, QUESTION)
    done = pagewire("chat", "--attach", address, *SAMPLING, stdin=f"{'long ' * 2000}\n{QUESTION}\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "cannot send this message: This model's maximum context length is" in done.stdout
        and done.stdout.endswith(f"> {answer}\n> \n")
    )


def test_without_a_standard_input(address: str) -> None:
    command = ["sh", "-c", '"$@" <&-', "sh", sys.executable, "-m", "pagewire.cli.main"]
    done = subprocess.run(
        [*command, "chat", "--attach", address], capture_output=True, text=True, timeout=60, env=ENVIRONMENT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"demo: {INTRODUCTION}\n", "")


def test_an_interrupted_answer_is_stopped_and_forgotten(address: str) -> None:
    process = start("chat", "--attach", address, *ENDLESS, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{QUESTION}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"demo: {INTRODUCTION}\n"
    assert len(process.stdout.read(3)) == 3  # the answer has begun
    process.send_signal(signal.SIGINT)
    with LLM.attach(address) as llm:
        while llm.llm_engine.session.call("status").result(60)["running"]:
            pass
    out, err = process.communicate(input="/exit\n", timeout=60)
    assert (process.returncode, err) == (0, "") and out.endswith("\n> ")


@pytest.mark.parametrize("kind", ["dumb", "xterm-256color"])
def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(
    address: str, kind: str, tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, "chat", "--attach", address, *ENDLESS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=ENVIRONMENT | {"TERM": kind, "XDG_STATE_HOME": str(tmp_path)},
    )
    os.close(theirs)
    seen = b""

    def read_until(pattern: bytes, begin: int) -> int:
        nonlocal seen
        while (found := re.search(pattern, seen[begin:])) is None:
            seen += os.read(ours, 4096)
        return begin + found.end()

    prompt = rb"[\r\n](\x1b\[[?0-9;]*[a-zA-Z])*> $"
    read_until(prompt, 0)
    os.write(ours, QUESTION.encode() + b"\n")
    place = read_until(re.escape(QUESTION.encode()) + rb"\r*\n", 0)  # the terminal's echo
    place = read_until(rb"\w{3}", place)
    os.write(ours, b"\x03")
    read_until(prompt, place)
    os.write(ours, b"\x04")
    try:
        while data := os.read(ours, 4096):
            seen += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0 and b"Traceback" not in seen and b"^C" in seen
    assert (tmp_path / "pagewire" / "chat_history").read_text().split("\n")[-2] == QUESTION


def test_commands_change_the_conversation(address: str, tmp_path: Path) -> None:
    again = "And what else?"
    first, second = answers(address, QUESTION, again)
    (latin,) = answers(address, QUESTION, system="Answer in Latin.")
    saved = tmp_path / "talk.json"
    lines = [QUESTION, f"/save {saved}", "/tokens", "/reset", f"/load {saved}", again, "/regenerate"]
    lines += ["/reset", "/tokens", "/system", "/system Answer in Latin.", QUESTION, "/help"]
    done = pagewire("chat", "--attach", address, *SAMPLING, stdin="\n".join(lines))
    assert (done.returncode, done.stderr) == (0, "")
    shown = done.stdout.split("> ")[1:]
    assert shown[0] == f"{first}\n" and shown[1] == f"2 messages are in {saved}\n"
    assert re.fullmatch(r"\d\d of 1024 tokens\n", shown[2])
    assert shown[3:8] == ["", f"2 messages were in {saved}\n", f"{second}\n", f"{second}\n", ""]
    assert shown[8].startswith("0 of ") and shown[9].startswith("there is no system message")
    assert shown[10:12] == ["Answer in Latin.\n", f"{latin}\n"]
    assert all(usage in shown[12] for usage in HELP)
    assert json.loads(saved.read_text()) == [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
    ]


def test_what_is_no_command_is_not_sent(address: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('[{"role": "user", "content": "x"}]')
    lines = [
        "/regenrate",
        "/image",
        "/save",
        f"/load {other}",
        f"/load {tmp_path / 'none'}",
        "/regenerate",
        "/exit",
    ]
    done = pagewire("chat", "--attach", address, *SAMPLING, stdin="\n".join(lines) + "\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.rstrip() for line in done.stdout.split("> ")[1:]] == [
        "unknown command '/regenrate'; did you mean '/regenerate'?; /help lists them",
        "image: the model takes no pictures",
        "the name of a file is missing",
        f"{other} holds no conversation that /save has written",
        f"[Errno 2] No such file or directory: '{tmp_path / 'none'}'",
        "there is no answer yet",
        "",
    ]


def test_messages_of_several_lines_and_with_a_slash(address: str) -> None:
    lines, slash = answers(address, "one\ntwo\n\nthree"), answers(address, "/etc is a folder")
    typed = '"""\none\ntwo\n\nthree\n"""\n/reset\none\\\ntwo\\\n\\\nthree\n/reset\n//etc is a folder\n'
    done = pagewire("chat", "--attach", address, *SAMPLING, stdin=typed)
    assert (done.returncode, done.stderr) == (0, "")
    shown = [part for part in done.stdout.replace(". ", "").split("> ")[1:] if part.strip()]
    assert shown == [f"{lines[0]}\n".replace(". ", "")] * 2 + [f"{slash[0]}\n".replace(". ", "")]


SHOWN = """
from pagewire.cli.chat.screen import new_screen
screen = new_screen()
screen.thought("Let me ")
screen.thought("see.")
text = "A **bold** word.\\n\\n```python\\nx = 1\\n\\ny = 2\\n```\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 \\x1b[2J|"
for character in text:
    screen.text(character)
screen.end()
"""


def in_terminal(**variables: str) -> str:
    """What `SHOWN` writes on a terminal."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "NO_COLOR"}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "60", **variables}
    process = subprocess.Popen([sys.executable, "-c", SHOWN], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 4096):
            seen += data
    except OSError:
        pass
    os.close(ours)
    assert process.wait(60) == 0, seen
    return seen.decode()


def test_thoughts_are_dimmed_and_markdown_is_drawn() -> None:
    shown = in_terminal()
    assert "\x1b[2mLet me " in shown and "\x1b[1mbold\x1b[0m" in shown
    assert "\x1b[2J" not in shown and "\\x1b[2J" in shown, "a model must not control the terminal"
    assert "|---|" in shown and "────" in shown, "a table stands there as it is until it is complete"
    plain = in_terminal(NO_COLOR="1")
    assert plain.startswith("Let me see.\r\n\r\nA **bold** word.") and "\x1b" not in plain
