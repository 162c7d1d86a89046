"""`pagewire rerank`: documents by how well they fit a query."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.options import add_attach_options, add_engine_options, positive
from pagewire.cli.console.terminal import show
from pagewire.cli.pool.texts import InputText, add_text_options, opened_texts, read_texts

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.ipc.wire.pooling import PoolingParams

DESCRIPTION = """Sort documents by how well they fit a query, the best first: by a cross-encoder, the cosine of
embeddings, or (ColBERT) the embeddings of tokens, as the model does. Printed are the score, the document's line in
the input and its text, with tabs between them."""


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser("rerank", help=SUMMARIES["rerank"], description=DESCRIPTION)
    parser.add_argument("query", help="what the documents are compared with")
    add_text_options(parser, "documents")
    parser.add_argument("--top-n", type=positive, metavar="INT", help="print only this many of the best")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print JSON lines as in the response of /v2/rerank: index, relevance_score, document",
    )
    add_attach_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the documents, the best first."""
    import msgspec

    from pagewire.cli.console.engine import opened
    from pagewire.cli.pool.batch import pooling_params

    params = pooling_params(truncate_prompt_tokens=options.truncate_prompt_tokens)
    with opened_texts(options) as lines:
        documents = list(read_texts(lines, options))
    check_documents(documents)
    with opened(options) as engine:
        scores = scores_of(engine, options.query, documents, params, options.no_progress)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    for index in order[: options.top_n]:
        document = documents[index]
        if options.json:
            result = {"index": index, "relevance_score": scores[index], "document": {"text": document.prompt}}
            if document.id is not None:
                result["document"] |= {"id": document.id}  # type: ignore[operator]
            show(msgspec.json.encode(result).decode())
        else:
            show(f"{scores[index]:.6f}\t{document.line}\t{' '.join(str(document.prompt).split())}")
    return 0


def check_documents(documents: Sequence[InputText]) -> None:
    """Check documents before an engine is started.

    Raises:
        ValueError: there are none, or one is no text.
    """
    if not documents:
        raise ValueError("there are no documents")
    for document in documents:
        if not isinstance(document.prompt, str):
            raise ValueError(f"line {document.line}: a document is a text, not token ids")


def scores_of(
    engine: AsyncLLM, query: str, documents: Sequence[InputText], params: PoolingParams, no_progress: bool
) -> list[float]:
    """The score of each document.

    Raises:
        ValueError: a text is refused, or the model scores no pairs. BatchError, EngineDeadError: see `pool_texts`.
    """
    from tqdm import tqdm

    from pagewire.cli.pool.batch import pool_texts
    from pagewire.frontend.requests.pooling.inputs import complete_pooling_params
    from pagewire.frontend.requests.pooling.scoring import ScorePlan

    plan = ScorePlan(engine.info, query, [document.prompt for document in documents])
    places = [f"line {document.line}" for document in documents]
    if len(plan.prompts) > len(documents):  # the query is embedded by itself
        places.insert(0, "the query")
    params = complete_pooling_params(params, engine.info, plan.task, None)
    total, hidden = len(plan.prompts), True if no_progress else None
    with tqdm(total=total, disable=hidden, unit=" texts", file=sys.stderr) as bar:
        outputs = pool_texts(engine, plan.prompts, places, params, lambda output: bar.update())
    return [output.outputs.score for output in plan.scores(outputs)]
