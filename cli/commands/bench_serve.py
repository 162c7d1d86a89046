"""`pagewire bench serve`: load on any OpenAI server, open loop (by rate) or closed loop (by concurrency)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.options import UsageError, json_object, positive

if TYPE_CHECKING:
    from pagewire.cli.load.client import LoadClient, Query, Target

DESCRIPTION = """Put load on a server that speaks OpenAI's API, and measure it. By default all requests come at
once; --request-rate spreads them (open loop), --concurrency keeps so many going (closed loop). Token counts are
the server's own (usage)."""
WARM_UP_SEED = 1 << 32


def register(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command below `bench`."""
    parser = kinds.add_parser("serve", help="load on an OpenAI server", description=DESCRIPTION)
    parser.set_defaults(run=run)
    add_server_options(parser.add_argument_group("Server"))
    add_prompt_options(parser.add_argument_group("Requests"))
    add_load_options(parser.add_argument_group("Load"))
    group = parser.add_argument_group("Results")
    group.add_argument(
        "--json", metavar="FILE", help="write all figures there, too; '-': print them, no table"
    )
    group.add_argument("--details", action="store_true", help="with --json: every request by itself")
    group.add_argument("--no-progress", action="store_true", help="no progress bar")


def add_server_options(group: Any) -> None:
    """Where the load goes."""
    group.add_argument(
        "--base-url", metavar="URL", help="the server, without /v1 (default: from host and port)"
    )
    group.add_argument(
        "--host", metavar="HOST", default="127.0.0.1", help="of the server (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=positive, metavar="INT", default=8000, help="of the server (default: %(default)s)"
    )
    group.add_argument("--uds", metavar="PATH", help="connect to this unix socket")
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help="which endpoint")
    group.add_argument(
        "--model",
        default="",
        metavar="NAME",
        help="its name there (default: the first that the server lists)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="shown to the server (default: PAGEWIRE_API_KEY or OPENAI_API_KEY)"
    )
    group.add_argument("--timeout", type=number, metavar="SECONDS", help="for one request (default: none)")


def add_prompt_options(group: Any) -> None:
    """What is asked for."""
    group.add_argument(
        "--num-prompts", type=positive, metavar="INT", default=200, help="requests (default: %(default)s)"
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
        help="of random prompts: so many tokens are the same in all",
    )
    group.add_argument(
        "--vocab-size",
        type=positive,
        metavar="INT",
        help="random ids are below (default: the tokenizer's, else 1000)",
    )
    group.add_argument("--text-file", type=Path, metavar="FILE", help="prompts are pieces of this text")
    group.add_argument(
        "--prompt-file",
        type=Path,
        metavar="FILE",
        help="a prompt per line; of .jsonl files: its field prompt",
    )
    group.add_argument("--tokenizer", metavar="NAME", help="folder or id (default: the server's)")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end of sequence")
    group.add_argument(
        "--temperature", type=float, metavar="FLOAT", default=0.0, help="0 is greedy (default: 0)"
    )
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="more request fields"
    )
    group.add_argument(
        "--seed", type=int, metavar="INT", default=0, help="of prompts, lengths and arrivals (default: 0)"
    )


def add_load_options(group: Any) -> None:
    """How it comes."""
    group.add_argument(
        "--request-rate", type=number, default=math.inf, metavar="R", help="per second (default: all at once)"
    )
    group.add_argument(
        "--burstiness",
        type=number,
        default=1.0,
        metavar="B",
        help="1: Poisson; below: bursts; above: steadier",
    )
    group.add_argument("--concurrency", type=positive, metavar="N", help="at most so many requests at once")
    group.add_argument(
        "--num-warmups", type=int, metavar="INT", default=2, help="requests beforehand (default: %(default)s)"
    )


def number(text: str) -> float:
    """A number over 0; inf is one."""
    if not (value := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be over 0, got {text}")
    return value


def span(text: str) -> Any:
    """A `Span`."""
    from pagewire.cli.load.prompts import Span

    try:
        return Span.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(options: argparse.Namespace) -> int:
    """Measure, print, write. Status 1 if no request succeeded."""
    from pagewire.cli.load.report import details, summary, table
    from pagewire.frontend import async_llm

    if options.text_file and options.prompt_file:
        raise UsageError("give --text-file or --prompt-file, not both")
    replies, seconds, target = async_llm.run(measure(options))
    found = summary(replies, seconds)
    if options.json:
        report = {"target": shown(target), "load": load_fields(options), **found}
        if options.details:
            report["requests"] = details(replies)
        if options.json == "-":
            print(json.dumps(report))
        else:
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if options.json != "-":
        print(table(found))
    return 0 if found["completed"] else 1


def shown(target: Target) -> dict[str, Any]:
    """The target without its key."""
    return {name: value for name, value in dataclasses.asdict(target).items() if name != "api_key"}


def load_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The options that make the load, for the record; an infinite rate is null."""
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
    """Replies, seconds, and what the load was put on.

    Raises:
        OSError: there is no such server. UsageError: no prompts could be made.
    """
    from tqdm import tqdm

    from pagewire.cli.load.client import arrivals, connected, drive

    target = target_of(options)
    async with connected(target) as client:
        if not target.model:
            models = (await client.ask("/v1/models"))["data"]
            client.target = target = dataclasses.replace(target, model=models[0]["id"])
        warm, queries = await make_queries(client, options)
        await drive(client.stream, warm, arrivals(len(warm), math.inf, 1.0, 0), None)
        due = arrivals(len(queries), options.request_rate, options.burstiness, options.seed)
        with tqdm(total=len(queries), disable=options.no_progress, unit="req", file=sys.stderr) as bar:
            replies, seconds = await drive(
                client.stream, queries, due, options.concurrency, lambda reply: bar.update()
            )
    return replies, seconds, target


def target_of(options: argparse.Namespace) -> Target:
    """Where and how requests are sent."""
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


async def make_queries(client: LoadClient, options: argparse.Namespace) -> tuple[list[Query], list[Query]]:
    """The queries of the warm-up, and those that count; the same for the same seed.

    Raises:
        UsageError: a file that cannot be read. OSError: the server cannot tokenize.
    """
    from pagewire.cli.load.prompts import (
        LOWEST_ID,
        Codec,
        draw_queries,
        random_tokens,
        read_prompts,
        read_text,
        repeat_queries,
        slices,
    )

    counts = (options.num_warmups, options.seed + WARM_UP_SEED), (options.num_prompts, options.seed)
    if options.prompt_file:
        prompts = read_prompts(options.prompt_file)
        warm, real = (repeat_queries(count, prompts, options.output_len, seed) for count, seed in counts)
        return warm, real
    codec = Codec(client, options.tokenizer)
    if options.text_file:
        source = slices(await codec.encode(read_text(options.text_file)))
    else:
        ids = range(LOWEST_ID, max(options.vocab_size or codec.vocab_size, LOWEST_ID + 1))
        source = random_tokens(ids, options.prefix_len, options.seed)
    lengths = options.input_len, options.output_len
    texts = codec if options.api == "chat" else None
    warm, real = [await draw_queries(count, source, *lengths, seed, texts) for count, seed in counts]
    return warm, real
