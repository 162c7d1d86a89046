"""`pagewire transcribe`: the text of a recording."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import add_attach_options, add_engine_options, given_options
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.frontend.speech.transcriber import TranscriptionParams

DESCRIPTION = """Write what is said in a recording (WAV, FLAC, OGG or MP3), as text or as subtitles, with a model
such as --model openai/whisper-small: by a core of its own, by a running core (--attach), or by a server (--url)."""
FORMATS = {"text": "text", "srt": "srt", "vtt": "vtt", "json": "verbose_json"}


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("transcribe", help=SUMMARIES["transcribe"], description=DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="the recording; '-': standard input")
    parser.add_argument(
        "--language", metavar="CODE", help="of the recording, such as en (default: it is detected)"
    )
    parser.add_argument("--translate", action="store_true", help="translate into English")
    parser.add_argument(
        "--prompt", metavar="TEXT", help="text that might stand before, for style and spelling"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="FLOAT",
        help="sampling temperature; 0 rises by itself while the text repeats itself (default: 0)",
    )
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="text",
        help="text, subtitles, or JSON with the segments (default: %(default)s)",
    )
    parser.add_argument("--url", metavar="URL", help="ask the server at this URL, without /v1")
    parser.add_argument(
        "--api-key", metavar="KEY", help="its API key (default: $PAGEWIRE_API_KEY or $OPENAI_API_KEY)"
    )
    add_attach_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the transcription of the file."""
    from pagewire.frontend.api import async_llm

    check_place(options)
    recording = read_recording(options.file)
    if options.url:
        text = async_llm.run(ask_server(options, recording))
    else:
        from pagewire.cli.console.engine import opened

        params = transcription_params(options)
        with opened(options) as engine:
            text = async_llm.run(ask_engine(engine, recording, params, FORMATS[options.format]))
    show(text.rstrip("\n"))
    return 0


def check_place(options: argparse.Namespace) -> None:
    """Check that no option is given that would be ignored.

    Raises:
        UsageError: one is.
    """
    if not options.url:
        if options.api_key:
            raise UsageError("--api-key needs --url")
        return
    others = [name for name in given_options(options) if name != "model"]
    if options.attach or options.config or others:
        name = "attach" if options.attach else "config" if options.config else others[0]
        raise UsageError(f"--{name.replace('_', '-')} has no effect with --url")


def read_recording(name: str) -> bytes:
    """The bytes of a file, or of standard input.

    Raises:
        UsageError: it cannot be read.
    """
    if name == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(name).expanduser().read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror}") from error


def transcription_params(options: argparse.Namespace) -> TranscriptionParams:
    """The parameters that the options say.

    Raises:
        UsageError: the language is unknown, or the temperature out of range.
    """
    from pagewire.frontend.speech.languages import language_code
    from pagewire.frontend.speech.transcriber import TEMPERATURES, TranscriptionParams

    if not 0 <= options.temperature <= 1:
        raise UsageError(f"--temperature must be from 0 to 1, got {options.temperature:g}")
    try:
        language = options.language and language_code(options.language)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    return TranscriptionParams(
        task="translate" if options.translate else "transcribe",
        language=language,
        prompt=options.prompt or "",
        temperatures=(options.temperature,) if options.temperature else TEMPERATURES,
    )


async def ask_engine(engine: AsyncLLM, recording: bytes, params: TranscriptionParams, form: Any) -> str:
    """The transcription by an engine.

    Raises:
        ValueError: the model does not hear, or the recording cannot be decoded.
    """
    from pagewire.frontend.speech.recording import Recording
    from pagewire.frontend.speech.transcriber import Transcriber

    async def generate(prompt: Any, sampling: Any) -> Any:
        outputs = [output async for output in engine.generate(prompt, sampling)]
        return outputs[-1].outputs[0]

    transcriber = Transcriber.of(engine.info, engine.session.intake.tokenizer, params, generate)
    source = engine.info.source
    assert source is not None, "the model hears"
    transcript = await transcriber.transcribe(Recording.decoded(recording, source))
    text: bytes | str = transcript.encode(form)
    return text.decode() if isinstance(text, bytes) else text


async def ask_server(options: argparse.Namespace, recording: bytes) -> str:
    """The transcription by a server.

    Raises:
        ValueError: it refuses; the text is its own. OSError: it cannot be reached.
    """
    import aiohttp

    form = aiohttp.FormData()
    form.add_field("file", recording, filename=Path(options.file).name)
    fields = {
        "model": getattr(options, "model", None),
        "language": options.language,
        "prompt": options.prompt,
        "temperature": f"{options.temperature:g}",
        "response_format": FORMATS[options.format],
    }
    for name, value in fields.items():
        if value is not None:
            form.add_field(name, value)
    key = options.api_key or os.environ.get("PAGEWIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    path = "translations" if options.translate else "transcriptions"
    timeout = aiohttp.ClientTimeout(total=None, connect=30)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.post(f"{options.url.rstrip('/')}/v1/audio/{path}", data=form) as response,
    ):
        text = await response.text()
    if response.status != 200:
        raise ValueError(f"the server answered {response.status}: {message_of(text)}")
    return text


def message_of(text: str) -> str:
    """The message in a server's error."""
    import msgspec

    try:
        return str(msgspec.json.decode(text)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return text[:200]
