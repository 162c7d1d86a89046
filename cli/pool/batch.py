"""Pools the texts of a command, with errors that say which of them is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pagewire.cli.console.parser import UsageError
from pagewire.ipc.wire.pooling import PoolingParams

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM
    from pagewire.frontend.requests.pooling.outputs import PoolingRequestOutput


def pooling_params(**fields: Any) -> PoolingParams:
    """The parameters that were given on the command line; None: not given.

    Raises:
        UsageError: a value is out of range.
    """
    try:
        return PoolingParams(**fields)
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def pool_texts(
    engine: AsyncLLM,
    prompts: Sequence[Any],
    places: Sequence[str],
    params: PoolingParams,
    tick: Callable[[PoolingRequestOutput[Any]], object],
) -> list[PoolingRequestOutput[Any]]:
    """The results of prompts, in order.

    places: where each prompt stands, such as "line 3". params: completed. tick: called with each result.

    Raises:
        ValueError: a prompt is refused; the message begins with its place. BatchError: the engine ended requests
            with an error. EngineDeadError: the core is lost.
    """
    from pagewire.frontend.api.batch import pool
    from pagewire.frontend.requests.outputs import batch_error

    names = iter(places)
    place = ""

    def next_id() -> str:  # asked for just before a prompt is checked
        nonlocal place
        place = next(names)
        return place.replace(" ", "-")

    try:
        each, adapters = [params] * len(prompts), [None] * len(prompts)
        outputs, failed = pool(engine.session, prompts, each, adapters, next_id, tick)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from error
    if failed is not None:
        raise batch_error(failed, outputs)
    return outputs
