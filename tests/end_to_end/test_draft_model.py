"""A draft model in a whole engine: the same tokens as without it, also after the worker is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import pagewire.demo
from pagewire import LLM, AsyncLLM, EngineArgs, SamplingParams
from tests.end_to_end.conftest import KV_BYTES
from tests.end_to_end.test_recovery import kill_worker, wait_for_start

FOLDER = Path(pagewire.demo.__path__[0])
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": KV_BYTES}
DRAFTER = {"model": str(FOLDER), "num_speculative_tokens": 3, "quantization": "int8"}
PROMPTS = ["The with statement", "A generator function", "class Foo:\n    def", "import re\n" * 20]
PARAMS = [
    SamplingParams(temperature=temperature, seed=7, max_tokens=32, ignore_eos=True, logprobs=0)
    for temperature in (0.0, 0.0, 0.8, 0.8)
]


def test_the_tokens_are_those_without_it_also_after_the_worker_is_killed(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in plain]

    async def main() -> None:
        args = EngineArgs("demo", speculative_config=DRAFTER, **OPTIONS)
        async with AsyncLLM.from_engine_args(args) as engine:
            begun, num_drafts = asyncio.Event(), 0

            async def tokens(index: int, name: str) -> list[int]:
                nonlocal num_drafts
                last: Any = None
                async for output in engine.generate(PROMPTS[index], PARAMS[index], f"{name}{index}"):
                    last = output
                    begun.set()
                num_drafts += last.metrics.num_draft_tokens
                return last.outputs[0].token_ids  # type: ignore[no-any-return]

            assert [await tokens(index, "alone") for index in range(4)] == expected
            # Whatever the steps took: once a few without drafts were measured, the first with drafts are trials
            # that no measurement forbids (`NUM_TRIALS` of the core's policy). One request is long enough for that.
            assert num_drafts > 0
            [info] = await asyncio.wrap_future(engine.session.call("model_info"))
            assert info["drafter"] == info["architecture"] == "LlamaForCausalLM"
            begun.clear()
            tasks = [asyncio.create_task(tokens(index, "killed")) for index in range(4)]
            await begun.wait()
            await kill_worker(engine)
            assert await asyncio.gather(*tasks) == expected
            await wait_for_start(engine, 2)

    asyncio.run(main())


def test_typical_acceptance_loses_and_doubles_no_token_when_the_worker_is_killed(llm: LLM) -> None:
    """Greedy tokens are those without drafts; others may differ from those without the crash, but stay."""
    plain = llm.generate(PROMPTS[:2], PARAMS[:2], use_tqdm=False)
    long = SamplingParams(temperature=1.0, seed=7, max_tokens=64, ignore_eos=True, logprobs=0)
    params = [*PARAMS[:2], long, long]
    args = EngineArgs(
        "demo",
        speculative_model=str(FOLDER),
        num_speculative_tokens=3,
        spec_decoding_acceptance_method="typical_acceptance_sampler",
        typical_acceptance_sampler_posterior_threshold=0.01,
        **OPTIONS,
    )

    async def main() -> None:
        async with AsyncLLM.from_engine_args(args) as engine:
            begun = asyncio.Event()

            async def stream(index: int) -> list[int]:
                tokens: list[int] = []
                async for output in engine.generate(PROMPTS[index], params[index], f"r{index}"):
                    found = output.outputs[0]
                    assert found.token_ids[: len(tokens)] == tokens and len(found.token_ids) == len(
                        found.logprobs
                    )
                    assert all(
                        token_id in each
                        for token_id, each in zip(found.token_ids, found.logprobs, strict=True)
                    )
                    tokens = list(found.token_ids)
                    if index >= 2:
                        begun.set()
                return tokens

            tasks = [asyncio.create_task(stream(index)) for index in range(len(PROMPTS))]
            await begun.wait()
            await kill_worker(engine)
            outputs = await asyncio.gather(*tasks)
            assert [len(tokens) for tokens in outputs] == [each.max_tokens for each in params]
            assert outputs[:2] == [output.outputs[0].token_ids for output in plain]
            await wait_for_start(engine, 2)

    asyncio.run(main())


def test_a_drafter_that_the_model_does_not_have_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="num_nextn_predict_layers"):
        LLM("demo", speculative_config={"method": "mtp"}, **OPTIONS)
