"""`pagewire embed`: embeddings of many texts."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import add_attach_options, add_engine_options, positive
from pagewire.cli.console.parser import UsageError
from pagewire.cli.pool.texts import add_text_options, count_lines, opened_texts, read_texts

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.ipc.wire.pooling import PoolingParams

DESCRIPTION = """Embed each line of a file or of standard input with a model of embeddings, such as --model
sentence-transformers/all-MiniLM-L6-v2. The embeddings are written batch by batch, as JSON lines or as a matrix
for numpy; after an error, the output has those of the batches before. --convert embed makes embeddings of a
causal model that generates."""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("embed", help=SUMMARIES["embed"], description=DESCRIPTION)
    add_text_options(parser, "texts")
    parser.add_argument(
        "-o",
        "--output",
        default="-",
        metavar="FILE",
        help="a path: .npy is a float32 matrix, others are JSON lines with index and embedding; '-': JSON lines to "
        "standard output (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=1024,
        metavar="INT",
        help="texts given to the engine at a time, and written together (default: %(default)s)",
    )
    parser.add_argument("--prompt-name", metavar="NAME", help="the model's prompt to put before each text")
    parser.add_argument(
        "--dimensions", type=int, metavar="INT", help="elements of an embedding, for Matryoshka models"
    )
    parser.add_argument(
        "--normalize",
        action=argparse.BooleanOptionalAction,
        help="scale embeddings to length 1 (default: as the model says)",
    )
    add_attach_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the embedding of each line."""
    from pagewire.cli.console.engine import opened
    from pagewire.cli.pool.batch import pooling_params

    params = pooling_params(
        truncate_prompt_tokens=options.truncate_prompt_tokens,
        prompt_name=options.prompt_name,
        dimensions=options.dimensions,
        normalize=options.normalize,
    )
    check_output(options)
    with opened_texts(options) as lines, opened(options) as engine:
        embed_lines(engine, lines, params, options)
    return 0


def check_output(options: argparse.Namespace) -> None:
    """Check the output before an engine is started.

    Raises:
        UsageError: it would overwrite the input, or its folder does not exist.
    """
    target = Path(options.output)
    if options.output == "-":
        return
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}")
    source = None if options.file in (None, "-") else Path(options.file)
    if source is not None and source.exists() and target.exists() and target.samefile(source):
        raise UsageError(f"the output would overwrite the input, {source}")


def embed_lines(
    engine: AsyncLLM, lines: IO[bytes], params: PoolingParams, options: argparse.Namespace
) -> None:
    """Write the embeddings of lines, batch by batch.

    Raises:
        ValueError: a text is refused, or there is none, or the model does not embed. OSError: the output cannot be
            written. BatchError, EngineDeadError: see `pool_texts`.
    """
    from tqdm import tqdm

    from pagewire.cli.pool.batch import pool_texts
    from pagewire.cli.pool.vectors import opened_vectors
    from pagewire.frontend.requests.pooling.inputs import complete_pooling_params

    params = complete_pooling_params(params, engine.info, "embed", None)
    total = count_lines(lines)
    texts = read_texts(lines, options)
    if not (batch := list(islice(texts, options.batch_size))):
        raise ValueError("there are no texts")
    hidden = True if options.no_progress else None
    with (
        opened_vectors(options.output) as writer,
        tqdm(total=total, disable=hidden, unit=" texts", file=sys.stderr) as bar,
    ):
        while batch:
            places = [f"line {text.line}" for text in batch]
            prompts = [text.prompt for text in batch]
            outputs = pool_texts(engine, prompts, places, params, lambda output: bar.update())
            writer.write(batch, [output.outputs.tensor for output in outputs])
            batch = list(islice(texts, options.batch_size))
