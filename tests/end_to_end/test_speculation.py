"""Speculative decoding with real processes: workers are killed, and outputs are those of an engine without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pagewire import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from tests.end_to_end.test_recovery import PROMPTS, Progress, kill_worker, mixed, status

LONG = [300, 400, 500] * 8


def params_of(index: int) -> SamplingParams:
    """Sampled, under a grammar, with a stop string; the last one greedy, and long enough to repeat itself."""
    if index == len(PROMPTS):
        return SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, logprobs=1)
    params = mixed(index)
    params.output_kind = RequestOutputKind.CUMULATIVE
    if index % 6 == 0:
        params.stop = ["e"]
    return params


def content(output: RequestOutput) -> tuple[object, ...]:
    """All that a user sees of a result."""
    first = output.outputs[0]
    return first.token_ids, first.text, first.logprobs, first.finish_reason, first.stop_reason


def test_drafts_and_killed_workers_change_nothing(start_daemon: Callable, llm: LLM) -> None:
    prompts = [*PROMPTS, LONG]
    alone = llm.generate(prompts, [params_of(i) for i in range(len(prompts))], use_tqdm=False)
    assert {output.outputs[0].stop_reason for output in alone} == {None, "e"}
    daemon = start_daemon("--max-num-batched-tokens", "64", "--speculative-config", '{"method": "suffix"}')

    async def run(engine: AsyncLLM, index: int, progress: Progress) -> RequestOutput:
        last, seen = None, 0
        params = params_of(index)
        params.output_kind = RequestOutputKind.CUMULATIVE
        async for last in engine.generate(prompts[index], params, f"r{index}"):
            progress.add(len(last.outputs[0].token_ids) - seen)
            seen = len(last.outputs[0].token_ids)
        assert last is not None
        return last

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as engine:
            # Whatever the steps took: the first drafts that are likely right are trials that no measurement
            # forbids (`NUM_TRIALS` of the core's policy), and all are right if only one token is allowed.
            params = SamplingParams(max_tokens=12, allowed_token_ids=[300], ignore_eos=True)
            async for _ in engine.generate([300], params, "one"):
                pass
            assert (await status(engine))["num_accepted_tokens"] > 0  # type: ignore[operator]
            progress = Progress()
            tasks = [asyncio.create_task(run(engine, i, progress)) for i in range(len(prompts))]
            for kill in range(1, 3):
                await progress.reach(kill * 300)
                await kill_worker(engine)
            outputs = await asyncio.gather(*tasks)
            for found, expected in zip(outputs, alone, strict=True):
                assert content(found) == content(expected)
            state = await status(engine)
            assert state["worker_starts"] >= 2 and state["num_free_blocks"] == state["num_blocks"]  # type: ignore[operator]
            metrics = [output.metrics for output in outputs if output.metrics is not None]
            num_accepted = sum(each.num_accepted_tokens for each in metrics)
            assert num_accepted < state["num_accepted_tokens"] <= state["num_draft_tokens"]  # type: ignore[operator]

    asyncio.run(main())
