"""`pagewire run-batch`: answer an OpenAI batch file with the server's endpoints, called within this process."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import (
    add_attach_options,
    add_engine_options,
    positive,
)
from pagewire.cli.console.parser import UsageError
from pagewire.frontend.server.http.options import ServerOptions
from pagewire.ipc.options.command_line import add_options_of

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.frontend.server.batches.lines import BatchResponse, Counts, Post

DESCRIPTION = """Answer every request of an OpenAI batch file: a JSON object per line with custom_id, method, url
(/v1/completions, /v1/chat/completions, /v1/responses) and body. Results are written in
order of completion. The exit status is 1 if a request failed."""
URL_SCHEMES = ("http://", "https://")
CHUNK_BYTES = 1 << 20  # downloads are copied to disk in pieces of this size


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("run-batch", help=SUMMARIES["run-batch"], description=DESCRIPTION)
    files = parser.add_argument_group("Files")
    files.add_argument(
        "-i", "--input-file", required=True, metavar="FILE", help="a path, '-', or an http(s) URL to GET"
    )
    files.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="a path, '-', or an http(s) URL to PUT to"
    )
    files.add_argument(
        "--output-tmp-dir", metavar="DIR", help="folder for the output until it is uploaded to its URL"
    )
    files.add_argument(
        "--resume",
        action="store_true",
        help="skip requests that the output file already answers successfully",
    )
    files.add_argument("--no-progress", action="store_true", help="no progress bar")
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=256,
        metavar="INT",
        help="requests at once (default: %(default)s)",
    )
    add_attach_options(parser)
    add_options_of(parser, ServerOptions, only=("Chat", "Models", "Answers"))
    add_engine_options(parser)
    parser.set_defaults(run=run, model_tag=None)


def run(options: argparse.Namespace) -> int:
    """Answer all lines and print how many succeeded and failed."""
    from pagewire.cli.commands.serve import take_server_options
    from pagewire.cli.console.engine import opened
    from pagewire.frontend.api import async_llm

    check_files(options)
    given = take_server_options(options)
    # Nobody would see the warning that another model answers, so that must be asked for.
    server_options = dataclasses.replace(
        given, disable_log_requests=True, any_model_name=bool(given.any_model_name)
    )
    with opened(options, server_options.restarts, server_options.reattach_timeout) as engine:
        counts = async_llm.run(answer_all(engine, options, server_options))
    skipped = f", {counts.skipped} already answered" if counts.skipped else ""
    print(f"{counts.good} answered, {counts.failed} failed{skipped}", file=sys.stderr)
    return 1 if counts.failed else 0


async def answer_all(engine: AsyncLLM, options: argparse.Namespace, server_options: ServerOptions) -> Counts:
    """Answer the input file's requests and return the counts.

    Raises:
        OSError: a file or URL cannot be read or written.
        EngineDeadError: the engine is lost; the results written so far are kept for --resume.
    """
    from tqdm import tqdm

    from pagewire.frontend.server.batches.lines import keep_answered, run_lines, write_to

    async with opened_input(options.input_file) as lines:
        total = sum(1 for line in lines if line.strip())
        lines.seek(0)
        answered: frozenset[str] = frozenset()
        if options.resume:
            answered = keep_answered(Path(options.output_file))
        async with opened_output(options) as output:
            with tqdm(total=total, disable=options.no_progress, unit="req", file=sys.stderr) as bar:
                return await run_lines(
                    lines,
                    poster(engine, server_options),
                    write_to(output, options.output_file),
                    options.concurrency,
                    answered,
                    bar.update,
                )


def poster(engine: AsyncLLM, options: ServerOptions) -> Post:
    """Return a function that posts a body to an endpoint of the server's application.

    That function raises EngineDeadError if the engine is lost.
    """
    from pagewire.frontend.server.batches import in_process
    from pagewire.frontend.server.wiring import create_app
    from pagewire.ipc.errors import EngineDeadError

    post = in_process.open_poster(create_app(engine, options), next(iter(options.keys()), None))

    async def post_while_alive(path: str, body: bytes) -> BatchResponse:
        response = await post(path, body)
        if response.status_code == 503 and engine.dead_error is not None:
            raise EngineDeadError(*engine.dead_error.args)
        return response

    return post_while_alive


# ---------------------------------------------------------------- files


def is_path(name: str) -> bool:
    """Return True if a file argument is neither a URL nor '-'."""
    return name != "-" and not name.startswith(URL_SCHEMES)


def check_files(options: argparse.Namespace) -> None:
    """Check the file arguments before an engine is started.

    Raises:
        UsageError: the input is not a file, the output would overwrite it, or --resume has no output file.
    """
    source, target = options.input_file, options.output_file
    if options.resume and not is_path(target):
        raise UsageError("--resume needs an output file with a path")
    if not is_path(source):
        return
    if not Path(source).is_file():
        raise UsageError(f"there is no file {source}")
    if is_path(target) and Path(target).exists() and Path(target).samefile(source):
        raise UsageError(f"the output would overwrite the input, {source}")


@asynccontextmanager
async def opened_input(name: str) -> AsyncIterator[IO[bytes]]:
    """Yield the input as a seekable file.

    Raises:
        OSError: the file or URL cannot be read.
    """
    if is_path(name):
        with Path(name).open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as copy:
        if name == "-":
            shutil.copyfileobj(sys.stdin.buffer, copy)
        else:
            await download(name, copy)
        copy.seek(0)
        yield copy


@asynccontextmanager
async def opened_output(options: argparse.Namespace) -> AsyncIterator[IO[bytes]]:
    """Yield the file that results are written to; on exit it is uploaded if the output is a URL.

    Raises:
        OSError: the file cannot be written, or the upload failed; the results are then kept in a local file.
    """
    name = options.output_file
    if name == "-":
        yield sys.stdout.buffer
    elif is_path(name):
        with Path(name).open("ab" if options.resume else "wb", buffering=0) as file:
            yield file
    else:
        descriptor, path = tempfile.mkstemp(".jsonl", "pagewire-batch-", options.output_tmp_dir)
        try:
            with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123
                yield file
            await upload(name, Path(path))
        except BaseException:
            print(f"the results so far are in {path}", file=sys.stderr)
            raise
        Path(path).unlink()


async def download(url: str, file: IO[bytes]) -> None:
    """Copy the body of an HTTP GET to a file.

    Raises:
        OSError: the request failed.
    """
    import aiohttp

    try:
        async with aiohttp.ClientSession(raise_for_status=True) as http, http.get(url) as response:
            async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                file.write(chunk)
    except aiohttp.ClientError as error:
        raise OSError(f"cannot read {url}: {error}") from error


async def upload(url: str, path: Path) -> None:
    """Send a file with an HTTP PUT.

    Raises:
        OSError: the request failed.
    """
    import aiohttp

    session = aiohttp.ClientSession(raise_for_status=True)
    headers = {"Content-Type": "application/jsonl"}
    try:
        with path.open("rb") as file:
            async with session as http, http.put(url, data=file, headers=headers):
                pass
    except aiohttp.ClientError as error:
        raise OSError(f"cannot write to {url}: {error}") from error
