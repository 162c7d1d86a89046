"""A real engine on encoder-decoders: prompts in all forms, the same bits in a batch and across a killed worker."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from pagewire.inputs import ExplicitEncoderDecoderPrompt, zip_enc_dec_prompts
from pagewire.ipc.files.hub import model_folder
from tests.end_to_end.conftest import KV_BYTES
from tests.workers.parity import make_prompts
from tests.workers.seq2seq.test_parity import expected_tokens
from tests.workers.seq2seq.tiny import BART_LIKE, VOCAB, WHISPER, save

NUM_TOKENS = 10
SOURCES = make_prompts(VOCAB, (20, 3, 33, 20))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, detokenize=False)


@pytest.fixture(scope="module")
def bart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("bart")
    return folder, save(folder, "bart", BART_LIKE)


async def generate(llm: AsyncLLM, source: list[int], name: str, first: asyncio.Event | None = None) -> Any:
    """The tokens of a source, and the bits of their log probabilities. first: set when there is a token."""
    params = GREEDY.clone()
    params.output_kind = RequestOutputKind.DELTA
    tokens: list[int] = []
    logprobs: list[Any] = []
    async for output in llm.generate({"prompt_token_ids": source}, params, name):
        tokens += output.outputs[0].token_ids
        for position in output.outputs[0].logprobs or []:
            logprobs.append([(token_id, entry.logprob) for token_id, entry in position.items()])
        if first is not None:
            first.set()
    return tokens, logprobs


def test_the_same_bits_in_a_batch_and_across_a_killed_worker(bart: tuple[Path, Any]) -> None:
    folder, model = bart

    async def run() -> None:
        args = EngineArgs(
            model=str(folder), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes=KV_BYTES
        )
        async with AsyncLLM.from_engine_args(args) as llm:
            alone = [await generate(llm, source, f"alone {i}") for i, source in enumerate(SOURCES)]
            assert [tokens for tokens, _ in alone] == [
                expected_tokens(model, {"input_ids": torch.tensor([source])}, [2]) for source in SOURCES
            ]
            batch = [generate(llm, source, f"batch {i}") for i, source in enumerate(SOURCES)]
            assert await asyncio.gather(*batch) == alone
            started = asyncio.Event()
            again = [
                asyncio.create_task(generate(llm, source, f"again {i}", started))
                for i, source in enumerate(SOURCES)
            ]
            await started.wait()
            status: Any = await asyncio.wrap_future(llm.session.call("status"))
            os.kill(status["worker_pid"], signal.SIGKILL)
            assert await asyncio.gather(*again) == alone, "on the next worker"

    asyncio.run(run())


def test_forms_of_prompts_and_what_is_refused(bart: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = bart
    demo = Path(model_folder("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder)
    llm = LLM(
        str(folder), dtype="float32", kv_cache_memory_bytes=KV_BYTES, speculative_config={"method": "ngram"}
    )
    try:
        tokens = {"prompt_token_ids": [8, 9, 10, 11]}
        prompts: list[Any] = [
            tokens,
            ExplicitEncoderDecoderPrompt(encoder_prompt=tokens, decoder_prompt=None),
            *zip_enc_dec_prompts([tokens, tokens], [{"prompt_token_ids": [2]}, {"prompt_token_ids": [9]}]),
        ]
        outputs = llm.generate(prompts, GREEDY)
        assert [output.prompt_token_ids for output in outputs] == [[2], [2], [2], [2, 9]]
        assert {tuple(output.encoder_prompt_token_ids or ()) for output in outputs} == {(8, 9, 10, 11)}
        first = outputs[0].outputs[0].token_ids
        assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids == first
        refused: list[tuple[Any, SamplingParams, str]] = [
            ({"encoder_prompt": None, "decoder_prompt": tokens}, GREEDY, "needs an 'encoder_prompt'"),
            ({"prompt_token_ids": [5] * 65}, GREEDY, "the encoder's prompt has 65 tokens"),
            ({"encoder_prompt": tokens, "decoder_prompt": {"prompt_token_ids": [5] * 64}}, GREEDY, "no room"),
            (tokens, SamplingParams(prompt_logprobs=1), "an encoder-decoder gives none"),
            ({**tokens, "multi_modal_data": {"image": 1}}, GREEDY, "the model takes no pictures"),
        ]
        for prompt, params, reason in refused:
            with pytest.raises(ValueError, match=reason):
                llm.generate(prompt, params)
    finally:
        llm.shutdown()


def test_a_model_that_hears(tmp_path: Path) -> None:
    save(tmp_path, "whisper", WHISPER)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True, num_gpu_blocks_override=400)
    try:
        sound = np.random.default_rng(0).standard_normal(16000).astype("float32")
        media = {"multi_modal_data": {"audio": (sound, 16000)}}
        start = {"prompt_token_ids": [2, 9]}
        prompts: list[Any] = [
            {**start, **media},
            {"encoder_prompt": {"prompt": "", **media}, "decoder_prompt": start},
            {**start, "multi_modal_data": {"audio": (sound, 8000)}},  # twice as long
        ]
        one, same, slower = (output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY))
        assert one == same != slower
        with pytest.raises(ValueError, match=r"the sound has 31\.0 seconds"):
            llm.generate({**start, "multi_modal_data": {"audio": (np.zeros(31 * 16000, "float32"), 16000)}})
        with pytest.raises(ValueError, match="give one sound"):
            llm.generate(start)
    finally:
        llm.shutdown()
