"""`pagewire bench serve`: load on any OpenAI server, as an open loop (by rate) or closed loop (by concurrency)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.console.options import positive
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show
from pagewire.ipc.options.command_line import json_object

if TYPE_CHECKING:
    from pagewire.cli.load.client import LoadClient, LoadQuery, Target

DESCRIPTION = """Put load on a server with OpenAI's API, and measure it. By default all requests are sent at once;
--request-rate spreads them over time (open loop), --concurrency keeps that many running (closed loop). Token counts
are the server's own (usage)."""
WARM_UP_SEED = (
    1 << 32
)  # added to the seed for warm-up prompts, so that they are not in the prefix cache later


def register(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command below `bench`."""
    parser = kinds.add_parser("serve", help="load on an OpenAI server", description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_server_options(parser.add_argument_group("Server"))
    add_prompt_options(parser.add_argument_group("Requests"))
    add_load_options(parser.add_argument_group("Load"))
    group = parser.add_argument_group("Results")
    group.add_argument(
        "--json",
        metavar="FILE",
        help="also write all figures to this file; '-': print them instead of the table",
    )
    group.add_argument(
        "--details", action="store_true", help="with --json: include the figures of every request"
    )
    group.add_argument(
        "--profile",
        action="store_true",
        help="let the server's workers write a profile of the measurement (the server needs --enable-admin)",
    )
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def add_server_options(group: Any) -> None:
    """Add the options that choose the server."""
    group.add_argument(
        "--base-url", metavar="URL", help="URL of the server, without /v1 (default: from --host and --port)"
    )
    group.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="the server's host (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=positive, metavar="INT", default=8000, help="the server's port (default: %(default)s)"
    )
    group.add_argument("--uds", metavar="PATH", help="connect to this Unix socket")
    group.add_argument(
        "--api", choices=("completions", "chat"), default="completions", help="endpoint to use"
    )
    group.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="the model's name on the server (default: the first that it lists)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="API key to send (default: $PAGEWIRE_API_KEY or $OPENAI_API_KEY)"
    )
    group.add_argument(
        "--timeout", type=number, metavar="SECONDS", help="time limit of one request (default: none)"
    )


def add_prompt_options(group: Any) -> None:
    """Add the options that choose prompts and outputs."""
    group.add_argument(
        "--num-prompts",
        type=positive,
        metavar="INT",
        default=200,
        help="number of requests (default: %(default)s)",
    )
    for name, of in (("--input-len", "tokens per prompt"), ("--output-len", "tokens to generate")):
        group.add_argument(
            name, type=span, default="128", metavar="N", help=f"{of}, or LOW:HIGH (default: %(default)s)"
        )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="INT",
        help="random prompts: number of leading tokens that all prompts share",
    )
    group.add_argument(
        "--vocab-size",
        type=positive,
        metavar="INT",
        help="random token ids are below this (default: the tokenizer's size, else 1000)",
    )
    group.add_argument(
        "--text-file", type=Path, metavar="FILE", help="take prompts from random places in this text"
    )
    group.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="take a prompt from each line; in .jsonl files, from the field 'prompt'",
    )
    group.add_argument(
        "--dataset-name",
        choices=("random", "sharegpt"),
        default="random",
        help="'sharegpt': prompts and output lengths of the conversations in --dataset-path (default: %(default)s)",
    )
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="JSON file of --dataset-name sharegpt"
    )
    group.add_argument(
        "--tokenizer", metavar="NAME", help="tokenizer folder or id (default: use the server's endpoints)"
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not stop at the end-of-sequence token")
    group.add_argument(
        "--temperature",
        type=float,
        metavar="FLOAT",
        default=0.0,
        help="sampling temperature; 0 is greedy (default: 0)",
    )
    group.add_argument(
        "--extra-body",
        type=json_object,
        default={},
        metavar="JSON",
        help="additional fields of every request",
    )
    group.add_argument(
        "--seed",
        type=int,
        metavar="INT",
        default=0,
        help="seed of prompts, lengths and arrival times (default: 0)",
    )


def add_load_options(group: Any) -> None:
    """Add the options that choose arrival times and concurrency."""
    group.add_argument(
        "--request-rate",
        type=number,
        default=math.inf,
        metavar="R",
        help="requests per second (default: all at once)",
    )
    group.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="B",
        help="shape of the arrivals: 1 Poisson, below 1 bursts, above 1 steadier (default: 1)",
    )
    group.add_argument("--concurrency", type=positive, metavar="N", help="most requests that run at once")
    group.add_argument(
        "--num-warmups",
        type=int,
        metavar="INT",
        default=2,
        help="number of requests before the measurement (default: %(default)s)",
    )


def number(text: str) -> float:
    """Parse a number over 0, which may be inf (an argparse type)."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be over 0, got {text}")
    return value


def span(text: str) -> Any:
    """Parse a `LengthRange` (an argparse type); imported late to keep `--help` fast."""
    from pagewire.cli.load.prompts import LengthRange

    try:
        return LengthRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Measure, then print and write the figures. Returns 1 if no request succeeded."""
    from pagewire.cli.load.report import details, summary, table
    from pagewire.frontend.api import async_llm

    if sum(map(bool, (options.text_file, options.prompt_file, options.dataset_path))) > 1:
        raise UsageError("give one of --text-file, --prompt-file and --dataset-path, not both")
    if (options.dataset_name == "sharegpt") != (options.dataset_path is not None):
        raise UsageError("--dataset-name sharegpt and --dataset-path go together")
    results, seconds, target = async_llm.run(measure(options))
    figures = summary(results, seconds)
    if options.json:
        report = {"target": shown(target), "load": load_fields(options), **figures}
        if options.details:
            report["requests"] = details(results)
        if options.json == "-":
            print(json.dumps(report))
        else:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.json != "-":
        show(table(figures))
    return 0 if figures["completed"] else 1


def shown(target: Target) -> dict[str, Any]:
    """Return the target as a dict, without its API key."""
    return {name: value for name, value in dataclasses.asdict(target).items() if name != "api_key"}


def load_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that define the load, to be written with the figures; an infinite rate becomes None."""
    names = (
        "num_prompts",
        "input_len",
        "output_len",
        "prefix_len",
        "request_rate",
        "burstiness",
        "concurrency",
    )
    fields = {name: getattr(options, name) for name in (*names, "seed", "ignore_eos")}
    fields |= {name: str(fields[name]) for name in ("input_len", "output_len")}
    return fields | {"request_rate": None if math.isinf(options.request_rate) else options.request_rate}


async def measure(options: argparse.Namespace) -> tuple[list[Any], float, Target]:
    """Send all requests; return their results, the seconds taken, and the target with its model name filled in.

    Raises:
        OSError: the server cannot be reached. UsageError: the prompts cannot be read.
    """
    from tqdm import tqdm

    from pagewire.cli.load.client import arrivals, connected, drive

    target = target_of(options)
    async with connected(target) as client:
        if not target.model:
            models = (await client.call("/v1/models"))["data"]
            client.target = target = dataclasses.replace(target, model=models[0]["id"])
        warm, queries = await make_queries(client, options)
        await drive(client.stream, warm, arrivals(len(warm), math.inf, 1.0, 0), None)
        due = arrivals(len(queries), options.request_rate, options.burstiness, options.seed)
        bar = tqdm(total=len(queries), disable=options.no_progress, unit="req", file=sys.stderr)
        async with client.profiled(options.profile):
            with bar:
                results, seconds = await drive(
                    client.stream, queries, due, options.concurrency, lambda result: bar.update()
                )
    return results, seconds, target


def target_of(options: argparse.Namespace) -> Target:
    """Return the target that the options describe."""
    from pagewire.cli.load.client import Target

    extra: dict[str, Any] = {"temperature": options.temperature}
    if options.ignore_eos:
        extra["ignore_eos"] = True
    key = options.api_key or os.environ.get("PAGEWIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return Target(
        url=(options.base_url or f"http://{options.host}:{options.port}")
        .removesuffix("/")
        .removesuffix("/v1"),
        api=options.api,
        model=options.model,
        api_key=key,
        uds=options.uds,
        extra=extra | options.extra_body,
        timeout=options.timeout,
    )


async def make_queries(
    client: LoadClient, options: argparse.Namespace
) -> tuple[list[LoadQuery], list[LoadQuery]]:
    """Return the warm-up queries and the measured queries, the same for the same seed.

    Raises:
        UsageError: a file cannot be read. OSError: the server cannot tokenize.
    """
    from pagewire.cli.load.client import LoadQuery
    from pagewire.cli.load.prompts import (
        LOWEST_ID,
        PromptTokenizer,
        draw_queries,
        random_tokens,
        read_prompts,
        read_text,
        repeat_queries,
        slices,
    )
    from pagewire.cli.load.sharegpt import conversations

    counts = (options.num_warmups, options.seed + WARM_UP_SEED), (options.num_prompts, options.seed)
    if options.prompt_file:
        prompts = read_prompts(options.prompt_file)
        warm, real = (repeat_queries(count, prompts, options.output_len, seed) for count, seed in counts)
        return warm, real
    codec = PromptTokenizer(client, options.tokenizer)
    if options.dataset_path:
        chosen = await conversations(
            options.dataset_path, options.num_warmups + options.num_prompts, options.seed, codec.encode
        )
        asked = [LoadQuery(text, num_out) for text, _, num_out in chosen]
        return asked[: options.num_warmups], asked[options.num_warmups :]
    if options.text_file:
        source = slices(await codec.encode(read_text(options.text_file)))
    else:
        ids = range(LOWEST_ID, max(options.vocab_size or codec.vocab_size, LOWEST_ID + 1))
        source = random_tokens(ids, options.prefix_len, options.seed)
    lengths = options.input_len, options.output_len
    texts = codec if options.api == "chat" else None
    warm, real = [await draw_queries(count, source, *lengths, seed, texts) for count, seed in counts]
    return warm, real
