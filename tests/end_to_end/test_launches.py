"""Several steps for one plan, with real processes: other messages, the same tokens."""

from __future__ import annotations

import asyncio

from pagewire import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from pagewire.frontend.api.async_llm import run

PROMPTS = ["The answer is", "In Python", "A", 'The "with" statement is used to']
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=5, max_tokens=41, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=7, top_p=0.9, max_tokens=33),
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
]


def test_launches_change_no_token() -> None:
    outputs = []
    for most in (1, 32):
        with LLM("demo", num_scheduler_steps=most) as llm:
            together = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            alone = [
                llm.generate(prompt, params, use_tqdm=False)[0]
                for prompt, params in zip(PROMPTS, PARAMS, strict=True)
            ]
        texts = [[output.outputs[0].token_ids for output in run] for run in (together, alone)]
        assert texts[0] == texts[1]
        outputs.append(texts[0])
    assert outputs[0] == outputs[1]


def test_a_newcomer_is_served_while_another_one_streams() -> None:
    """Deltas have several tokens; a request that comes between them, and one that leaves, change nothing."""
    endless = SamplingParams(
        temperature=0.0, max_tokens=700, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def main() -> tuple[list[int], list[list[int]], list[int]]:
        llm = AsyncLLM.from_engine_args(EngineArgs("demo"))
        try:
            deltas, newcomers = [], []
            async for output in llm.generate(PROMPTS[0], endless):
                deltas.append(output.outputs[0].token_ids)
                if len(deltas) % 20 == 5:
                    newcomers.append(asyncio.create_task(last(llm, PROMPTS[1])))
                    await asyncio.sleep(0)
            found = await asyncio.gather(*newcomers)
            return [token_id for delta in deltas for token_id in delta], deltas, found[0]
        finally:
            llm.shutdown()

    async def last(llm: AsyncLLM, prompt: str) -> list[int]:
        return [output async for output in llm.generate(prompt, PARAMS[2])][-1].outputs[0].token_ids

    tokens, deltas, newcomer = run(main())
    with LLM("demo", num_scheduler_steps=1) as llm:
        final = SamplingParams(temperature=0.0, max_tokens=700, ignore_eos=True)
        assert llm.generate(PROMPTS[0], final, use_tqdm=False)[0].outputs[0].token_ids == tokens
        assert llm.generate(PROMPTS[1], PARAMS[2], use_tqdm=False)[0].outputs[0].token_ids == newcomer
    assert max(map(len, deltas)) > 1
