"""`pagewire chat`, over a pipe and in a terminal."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys

from pagewire import LLM, SamplingParams
from pagewire.cli.commands.chat import COMMANDS
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
    assert done.stdout == f"demo: {COMMANDS}\n> {first}\n> > {second}\n> > {anew}\n> "


def test_end_of_file_ends_it_and_the_system_prompt_is_sent(address: str) -> None:
    (answer,) = answers(address, QUESTION, system="Answer in Latin.")
    arguments = ["chat", "--attach", address, *SAMPLING, "--system", "Answer in Latin."]
    done = pagewire(*arguments, stdin=f"/reset\n{QUESTION}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"demo: {COMMANDS}\n> > {answer}\n> \n"


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
    assert (done.returncode, done.stdout, done.stderr) == (0, f"demo: {COMMANDS}\n", "")


def test_an_interrupted_answer_is_stopped_and_forgotten(address: str) -> None:
    process = start("chat", "--attach", address, *ENDLESS, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{QUESTION}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"demo: {COMMANDS}\n"
    assert len(process.stdout.read(3)) == 3  # the answer has begun
    process.send_signal(signal.SIGINT)
    with LLM.attach(address) as llm:
        while llm.llm_engine.session.call("status").result(60)["running"]:
            pass
    out, err = process.communicate(input="/exit\n", timeout=60)
    assert (process.returncode, err) == (0, "") and out.endswith("\n> ")


def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(address: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, "chat", "--attach", address, *ENDLESS],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    seen = b""

    def read_until(end: bytes, begin: int) -> int:
        nonlocal seen
        while end not in seen[begin:]:
            seen += os.read(ours, 4096)
        return seen.index(end, begin) + len(end)

    place = read_until(b"\n> ", 0)
    os.write(ours, QUESTION.encode() + b"\n")
    place = read_until(b"\n", place)  # the terminal's echo
    while len(seen) < place + 3:
        seen += os.read(ours, 4096)
    os.write(ours, b"\x03")
    place = read_until(b"\n> ", place)
    os.write(ours, b"\x04")
    try:
        while data := os.read(ours, 4096):
            seen += data
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0 and b"Traceback" not in seen and b"^C" in seen
