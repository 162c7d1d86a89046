"""A real engine on a model whose layers keep states: the same bits with cached prefixes, in a batch, and across a
killed worker."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from pagewire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from tests.end_to_end.conftest import KV_BYTES
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.parity import make_prompts, transformers_tokens

NUM_TOKENS = 12
MANY = 64
SHARED = make_prompts(VOCAB_SIZE, [70], seed=4)[0]
PROMPTS = [SHARED, SHARED[:40] + [9], *make_prompts(VOCAB_SIZE, (3, 33, 17))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SERVED["qwen3_5_text"].write(tmp_path_factory.mktemp("hybrid"))


async def generate(
    llm: AsyncLLM, prompt: list[int], name: str, first: asyncio.Event | None = None, salt: str | None = None
) -> Any:
    """The tokens of a prompt, and the bits of their log probabilities; and how many were cached.

    first: set when there is a token. salt: of a prompt that shares no prefix with those of other salts.
    """
    params = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=2,
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
    )
    tokens: list[int] = []
    logprobs: list[Any] = []
    num_cached = 0
    content = {"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt})
    async for output in llm.generate(content, params, name):
        tokens += output.outputs[0].token_ids
        logprobs += [
            [(token_id, entry.logprob) for token_id, entry in position.items()]
            for position in output.outputs[0].logprobs or []
        ]
        num_cached = output.num_cached_tokens or num_cached
        if first is not None:
            first.set()
    return (tokens, logprobs), num_cached


async def status(llm: AsyncLLM) -> dict[str, Any]:
    return await asyncio.wrap_future(llm.session.call("status"))  # type: ignore[no-any-return]


def test_bits_with_cached_prefixes_in_a_batch_and_across_a_killed_worker(folder: Path) -> None:
    async def run() -> None:
        args = EngineArgs(
            model=str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes=KV_BYTES,
            max_num_seqs=MANY,
            max_num_batched_tokens=32,
        )
        async with AsyncLLM.from_engine_args(args) as llm:
            alone = [await generate(llm, prompt, f"alone {i}") for i, prompt in enumerate(PROMPTS)]
            expected = [result for result, _ in alone]
            assert [tokens for tokens, _ in expected] == transformers_tokens(folder, PROMPTS, NUM_TOKENS)
            batch = await asyncio.gather(
                *(generate(llm, prompt, f"batch {i}") for i, prompt in enumerate(PROMPTS))
            )
            assert [result for result, _ in batch] == expected, "with cached prefixes"
            assert [cached for _, cached in alone] == [0, 32, 0, 0, 0]
            assert [cached for _, cached in batch] == [64, 32, 0, 32, 16], (
                "up to the last block of each prompt"
            )
            # As many as run at once, on prefixes of each other, with their states cached and without.
            many = [[*SHARED[:length], 7] for length in range(MANY)]
            warm = await asyncio.gather(
                *(generate(llm, prompt, f"warm {i}") for i, prompt in enumerate(many))
            )
            salted = (generate(llm, prompt, f"cold {i}", salt=f"{i}") for i, prompt in enumerate(many))
            cold = await asyncio.gather(*salted)
            assert [result for result, _ in warm] == [result for result, _ in cold]
            assert max(cached for _, cached in cold) == 0 < min(cached for _, cached in warm[17:])
            for i in (0, 40):
                assert (await generate(llm, many[i], f"single {i}", salt="single"))[0] == cold[i][0]
            started = asyncio.Event()
            again = [
                asyncio.create_task(generate(llm, prompt, f"again {i}", started))
                for i, prompt in enumerate(PROMPTS)
            ]
            await started.wait()
            os.kill((await status(llm))["worker_pid"], signal.SIGKILL)
            assert [result for result, _ in await asyncio.gather(*again)] == expected, "on the next worker"

    asyncio.run(run())
