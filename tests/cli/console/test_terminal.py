"""What a model or a peer wrote does not control the terminal that shows it."""

from __future__ import annotations

import asyncio
import os
import unicodedata
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
import zmq

from pagewire import AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from pagewire.cli.commands.generate import stream
from pagewire.cli.console.terminal import safe_text, show
from pagewire.cli.main import main
from pagewire.ipc.quoting import on_one_line
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import Refused, ToFrontend
from pagewire.ipc.wire.sockets import bind_router

TITLE = "\x1b]0;taken\x07"
CLEAR = "\x1b[2J"


@contextmanager
def terminal() -> Iterator[tuple[TextIO, int]]:
    """A terminal: the stream that a command writes to, and the descriptor that its output is read from."""
    seen, shown = os.openpty()
    with os.fdopen(shown, "w", encoding="utf-8") as stream:
        yield stream, seen
    os.close(seen)


def output(seen: int, end: bytes) -> bytes:
    """What was written to a terminal, which may come in parts, up to this end."""
    said = b""
    while not said.endswith(end):
        said += os.read(seen, 1000)
    return said


def test_controls_are_shown_and_letters_are_left() -> None:
    kept = "\n\t aé中\u0301👩\u200d👩\N{NO-BREAK SPACE}"
    assert safe_text(kept) == kept
    assert (
        safe_text(f"{TITLE}\x9b2J\r\x7f\u202e\ud800") == "\\x1b]0;taken\\x07\\x9b2J\\x0d\\x7f\\u202e\\ud800"
    )
    assert on_one_line("a\n\tb") == "a\\x0a\\x09b"


def test_no_character_that_a_terminal_obeys_is_left() -> None:
    text = safe_text("".join(map(chr, range(0x110000))))
    assert {letter for letter in text if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")} == {
        "\n",
        "\t",
    }
    # Left to right, right to left, Arabic, neutral, numbers, marks: no explicit direction.
    explicit = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not {unicodedata.bidirectional(letter) for letter in text} & explicit


def test_only_a_terminal_is_protected(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal() as (stream, seen):
        for piece in ("\x1b", "[2J", "\x1b[", "2J"):  # as a stream may cut it
            show(piece, end="", stream=stream)
        twice = b"\\x1b[2J\\x1b[2J"
        assert output(seen, twice) == twice
    show(CLEAR)
    assert capsys.readouterr().out == f"{CLEAR}\n"


def test_a_model_cannot_send_escape_sequences(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is made to generate some, and `generate` and `chat` print its output by `stream`."""

    async def generate() -> str:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=40,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=StructuredOutputsParams(choice=[TITLE + CLEAR]),
        )
        async with AsyncLLM.attach(address) as engine:
            return await stream(engine, "Say:", params)

    with terminal() as (shown, seen):
        monkeypatch.setattr("sys.stdout", shown)
        assert asyncio.run(generate()) == TITLE + CLEAR
        escaped = b"\\x1b]0;taken\\x07\\x1b[2J"
        assert output(seen, escaped) == escaped


def test_what_a_core_refuses_with_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"ipc://{tmp_path}/core.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    core = bind_router(context, address)

    def refuse() -> None:
        identity, _ = core.recv_multipart()
        core.send_multipart([identity, *Codec(ToFrontend).encode(Refused(f"no {CLEAR}"))])

    with terminal() as (shown, seen), ThreadPoolExecutor() as pool:
        monkeypatch.setattr("sys.stderr", shown)
        answered = pool.submit(refuse)
        assert main(["top", "--once", "--attach", address]) == 1
        answered.result()
        assert b"no \\x1b[2J" in (said := output(seen, b"\n")) and b"pagewire top:" in said
    context.destroy(0)
