"""Promised prefixes on a real engine: found under pressure with the same tokens, released, and refused by words."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pagewire import LLM, Retention, SamplingParams
from pagewire.frontend.requests.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[Random(number).randrange(300, 2000) for _ in range(330)] for number in range(10)]
CACHED = 320  # whole blocks, without the last token's
# Room for six of the prompts; promises may take a half, which are two, or three less a block.
SMALL = {"num_gpu_blocks_override": 128, "max_model_len": 1024, "max_retained_share": 0.5}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", device="cpu", dtype="float32", num_threads=1, **SMALL) as engine:
        yield engine


def run(llm: LLM, prompt: list[int], **wish: Any) -> RequestOutput:
    given: Any = {"prompt_token_ids": prompt} | ({"cache_retention": Retention(**wish)} if wish else {})
    return llm.generate([given], GREEDY, use_tqdm=False)[0]


def blocks(llm: LLM) -> int:
    """KV blocks that promises keep."""
    rows = llm.session.call("metrics").result()
    (row,) = [
        row for row in rows if row["name"] == "pagewire:retained_blocks" and row["labels"]["kind"] == "kept"
    ]
    return int(row["value"])


def test_promises_are_kept_under_pressure_and_released(llm: LLM) -> None:
    first, others = PROMPTS[0], PROMPTS[1:]
    cold = run(llm, first, seconds=3600.0, name="a", with_output=True)
    assert cold.num_cached_tokens == 0 and cold.retained[0].num_tokens == 336 and blocks(llm) == 21
    for prompt in others * 2:
        run(llm, prompt)
    warm = run(llm, first)
    assert warm.num_cached_tokens == CACHED
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids and not warm.retained
    assert llm.release_prefixes("b") == 0 and llm.release_prefixes("a") == 336 and blocks(llm) == 0
    for prompt in others * 2:
        run(llm, prompt)
    assert run(llm, first).num_cached_tokens == 0


def test_what_is_refused_is_said(llm: LLM) -> None:
    outputs = [run(llm, prompt, seconds=3600.0, name="c") for prompt in PROMPTS[:4]]
    kept = [output.retained[0].num_tokens for output in outputs]
    assert kept == [320, 320, 320, 64] and "of 64 KV blocks" in outputs[3].retained[0].refusal
    assert llm.reset_prefix_cache() and blocks(llm) == 0


@pytest.mark.parametrize(
    ("wish", "error", "why"),
    [
        (Retention(0.0), ValueError, "seconds must be in"),
        (Retention(1e9), ValueError, "seconds must be in"),
        (Retention(float("nan")), ValueError, "seconds must be"),
        (Retention(num_tokens=-1), ValueError, "num_tokens must be at least 0"),
        ([Retention()] * 5, ValueError, "at most 4"),
        (300.0, TypeError, "must be a Retention"),
    ],
)
def test_bad_wishes_are_refused(llm: LLM, wish: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        llm.generate([{"prompt_token_ids": [5, 6], "cache_retention": wish}], GREEDY, use_tqdm=False)
