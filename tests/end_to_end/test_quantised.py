"""A quantised checkpoint through a whole engine: the same bits alone, in a crowd and after the worker is killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pagewire import LLM, AsyncLLM, EngineArgs, SamplingParams
from tests.end_to_end.conftest import KV_BYTES
from tests.end_to_end.test_recovery import kill_worker, wait_for_start
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.parity import make_prompts
from tests.workers.quantised_models import write_packed

PROMPTS = make_prompts(VOCAB_SIZE, tuple(range(3, 35, 2)))
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": KV_BYTES,
    "max_model_len": 128,
}


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama in AWQ."""
    folder = tmp_path_factory.mktemp("awq")
    return write_packed(
        Architecture("llama", GROUPED | {"intermediate_size": 128}).write(folder / "dense"), folder
    )[0]


async def outputs(llm: AsyncLLM, index: int, name: str, begun: asyncio.Event | None = None) -> list[Any]:
    """Tokens and log probabilities of a prompt's continuation. begun: set when the first has come."""
    params = SamplingParams(temperature=1.0, seed=index, max_tokens=90, logprobs=0, ignore_eos=True)
    last: Any = None
    async for output in llm.generate(PROMPTS[index], params, f"{name}{index}"):
        last = output.outputs[0]
        if begun is not None:
            begun.set()
    tokens = last.token_ids
    return [tokens, [row[token].logprob for row, token in zip(last.logprobs, tokens, strict=True)]]


def test_alone_in_a_crowd_and_after_the_worker_is_killed(awq: Path) -> None:
    async def main() -> None:
        args = EngineArgs(str(awq), dtype="bfloat16", quantization="AWQ", **OPTIONS)
        async with AsyncLLM.from_engine_args(args) as llm:
            alone = [await outputs(llm, index, "alone") for index in (0, 7, 15)]
            crowd = await asyncio.gather(*(outputs(llm, index, "crowd") for index in range(16)))
            assert [crowd[index] for index in (0, 7, 15)] == alone
            begun = asyncio.Event()
            tasks = [asyncio.create_task(outputs(llm, index, "killed", begun)) for index in range(16)]
            await begun.wait()
            await kill_worker(llm)
            assert await asyncio.gather(*tasks) == crowd
            await wait_for_start(llm, 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "gptq_marlin"}, "'gptq_marlin', but the checkpoint is quantised with 'awq'"),
        ({"quantization": "int8"}, "'int8', but the checkpoint is quantised with 'awq'"),
        (
            {"hf_overrides": {"quantization_config": {"quant_method": "quanto"}}},
            "'quanto' are not served; those of aqlm",
        ),
    ],
)
def test_a_quantisation_that_does_not_fit_is_a_value_error(
    awq: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        LLM(str(awq), **OPTIONS, **options)
    assert type(caught.value) is ValueError
