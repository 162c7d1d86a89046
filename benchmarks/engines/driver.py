"""What the drivers of all engines share: works come in as lines of JSON, timings go out as lines of JSON.

Needs nothing but the standard library, so that it runs in the environment of any engine.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

LOWEST_ID, HIGHEST_ID = 10, 31_000
Generate = Callable[[list[list[int]], int], Any]
"""Runs prompts of token ids greedily, past the end of sequence, for so many tokens each; waits for all."""


def prompts(work: dict[str, int]) -> list[list[int]]:
    """`count` prompts of `input` random tokens, of which the first `shared` are the same in all."""
    rng = random.Random(work["seed"])

    def tokens(count: int) -> list[int]:
        return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]

    shared = tokens(work["shared"])
    return [shared + tokens(work["input"] - work["shared"]) for _ in range(work["count"])]


def serve(start: Callable[[str], tuple[Generate, Callable[[], dict[str, float]]]]) -> None:
    """Start the engine on the model named by the first argument, then do the works that come.

    `start` returns the engine's generate, and a function whose figures are added to each answer (`seconds` among
    them: the engine's own time, instead of ours).
    """
    begin = time.perf_counter()
    generate, figures = start(sys.argv[1])
    answer(start_s=time.perf_counter() - begin)
    for line in sys.stdin:
        work = json.loads(line)
        batch = prompts(work)
        figures()
        begin = time.perf_counter()
        generate(batch, work["output"])
        seconds = time.perf_counter() - begin
        answer(**{"seconds": seconds, **figures()})


def answer(**values: float) -> None:
    """Engines print as they like; our lines begin with an at sign."""
    print("@" + json.dumps(values), flush=True)
