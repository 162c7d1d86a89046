"""Progress bars over the requests of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from pagewire.frontend.requests.outputs import RequestOutput
from pagewire.frontend.requests.pooling.outputs import PoolingRequestOutput

Tick: TypeAlias = Callable[[RequestOutput | PoolingRequestOutput[Any] | None], None]


@contextmanager
def progress_bar(total: int, use_tqdm: bool | Callable[..., Any]) -> Iterator[Tick]:
    """A bar over requests that also shows tokens per second; called with each finished output."""
    if not use_tqdm:
        yield lambda output: None
        return
    if callable(use_tqdm):
        make: Callable[..., Any] = use_tqdm
    else:
        from tqdm.auto import tqdm as make
    begin, num_in, num_out = time.perf_counter(), 0, 0
    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:

        def tick(output: RequestOutput | PoolingRequestOutput[Any] | None) -> None:
            nonlocal num_in, num_out
            if output is not None:
                num_in += len(output.prompt_token_ids or ())
                if isinstance(output, RequestOutput):
                    num_out += sum(len(completion.token_ids) for completion in output.outputs)
                seconds = time.perf_counter() - begin
                bar.set_postfix_str(
                    f"est. speed input: {num_in / seconds:.2f} toks/s, output: {num_out / seconds:.2f} toks/s"
                )
            bar.update(1)

        yield tick
