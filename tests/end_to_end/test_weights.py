"""`update_weights` on real engines: every output is that of a fresh engine with the weights that it names."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import pagewire.demo
from pagewire import (
    LLM,
    AsyncLLM,
    EngineArgs,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    WeightsChangedError,
)
from tests.end_to_end.conftest import KV_BYTES, Daemon
from tests.end_to_end.http_server import Server
from tests.workers.driver import Driver, load_runner

DEMO = Path(pagewire.demo.__file__).parent
NUM_VARIANTS = 4
PROMPTS = [[300 + i, 400, 500 + i] * (1 + 3 * (i % 5)) for i in range(12)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_memory_bytes": KV_BYTES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models "0" to "3": the demo model in float32, and variants of it."""
    folder = tmp_path_factory.mktemp("weights")
    own = {name: tensor.float() for name, tensor in load_file(DEMO / "model.safetensors").items()}
    for number in range(NUM_VARIANTS):
        generator = torch.Generator().manual_seed(number)
        shutil.copytree(DEMO, folder / str(number), ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for tensor in own.values() if number else ():
            tensor += 0.5 * tensor.std() * torch.randn(tensor.shape, generator=generator)
        save_file(own, folder / str(number) / "model.safetensors")
    return folder


def tensors_of(folder: Path, number: int) -> dict[str, torch.Tensor]:
    return load_file(folder / str(number) / "model.safetensors")


Fresh = Callable[[int, list[int], int], list[int]]


@pytest.fixture(scope="module")
def fresh(folder: Path) -> Iterator[Fresh]:
    """`fresh(2, prompt, 10)`: what a worker that was started with variant 2 gives, token by token, alone."""
    runners = [
        load_runner(folder / str(i), dtype="float32", max_model_len=256, block_size=16)[0]
        for i in range(NUM_VARIANTS)
    ]
    known: dict[tuple[int, tuple[int, ...], int], list[int]] = {}

    def run(number: int, prompt: list[int], count: int) -> list[int]:
        key = (number, tuple(prompt), count)
        if key not in known:
            known[key] = Driver(runners[number], budget=256).generate([prompt], count)[0] if count else []
        return known[key]

    yield run
    runners.clear()


def generate(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [list(o.outputs[0].token_ids) for o in llm.generate(list(prompts), GREEDY, use_tqdm=False)]


def test_every_output_is_that_of_a_fresh_engine(folder: Path, fresh: Fresh) -> None:
    """From a file, a folder, and tensors of PyTorch and NumPy; the prefix cache finds nothing old."""
    with LLM("demo", weights_dir=str(folder), **OPTIONS) as llm:
        assert generate(llm) == [fresh(0, prompt, 40) for prompt in PROMPTS]
        arrays = {name: tensor.numpy() for name, tensor in tensors_of(folder, 3).items()}
        for number, weights in (
            (1, folder / "1"),
            (2, "2/model.safetensors"),
            (0, tensors_of(folder, 0)),
            (3, arrays),
        ):
            assert llm.update_weights(weights, version=f"v{number}") == f"v{number}"
            expected = [fresh(number, prompt, 40) for prompt in PROMPTS]
            for cached in (False, True):
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in outputs] == expected
                assert {output.outputs[0].weights_version for output in outputs} == {f"v{number}"}
                assert any(output.num_cached_tokens for output in outputs) or not cached
        with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
            llm.update_weights({"lm_head.weight": torch.zeros(4096, 256)})
        with pytest.raises(ValueError, match=r"'model.norm.weight' is of shape \[255\]"):
            llm.update_weights({"model.norm.weight": torch.zeros(255)})
        with pytest.raises(TypeError, match="must be a tensor of float32, float16, bfloat16, got float64"):
            llm.update_weights({"model.norm.weight": torch.zeros(256, dtype=torch.float64)})
        with pytest.raises(PermissionError, match="is not below"):
            llm.update_weights(DEMO / "model.safetensors")
        assert generate(llm) == expected
    with LLM(str(folder / "3"), **OPTIONS) as other:
        assert generate(other) == expected, "another engine"


def test_ranks_and_packed_weights(folder: Path) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "quantization": "int8"}
    with LLM("demo", **options, **OPTIONS) as llm:
        llm.update_weights(tensors_of(folder, 1))
        updated = generate(llm)
    with LLM(str(folder / "1"), **options, **OPTIONS) as other:
        assert generate(other) == updated


def test_log_probabilities_are_those_of_a_prompt_s_pass(folder: Path) -> None:
    """Bit for bit: what is sampled and what is trained on is one distribution."""
    with LLM("demo", weights_dir=str(folder), max_logprobs=0, **OPTIONS) as llm:
        for weights in (None, folder / "1"):
            if weights is not None:
                llm.update_weights(weights)
            params = SamplingParams(max_tokens=60, seed=3, logprobs=0, ignore_eos=True)
            for output in llm.generate(PROMPTS, params, use_tqdm=False):
                own = output.outputs[0]
                assert own.logprobs is not None and output.prompt_token_ids is not None
                sampled = [
                    step[token].logprob for step, token in zip(own.logprobs, own.token_ids, strict=True)
                ]
                whole = [*output.prompt_token_ids, *own.token_ids]
                again = SamplingParams(max_tokens=1, prompt_logprobs=0)
                (passed,) = llm.generate([whole], again, use_tqdm=False)
                assert passed.prompt_logprobs is not None
                known = passed.prompt_logprobs[len(output.prompt_token_ids) :]
                assert sampled == [
                    step[token].logprob for step, token in zip(known, own.token_ids, strict=True)
                ]


def test_fifty_updates_under_load(folder: Path, fresh: Fresh, start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon("--weights-dir", str(folder), "--max-model-len", "256", "--max-num-seqs", "6")
    numbers: dict[str, int] = {"": 0}
    rng = random.Random(1)
    outputs: list[tuple[list[int], list[int], Sequence[tuple[int, str]]]] = []
    ended = 0

    async def stream(llm: AsyncLLM, index: int, stop: asyncio.Event) -> None:
        nonlocal ended
        number = 0
        while not stop.is_set():
            prompt, number = [*PROMPTS[index], 100 + number], number + 1
            params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
            params.output_kind = RequestOutputKind.DELTA
            tokens: list[int] = []
            versions: Sequence[tuple[int, str]] = ()
            try:
                async for output in llm.generate(prompt, params, f"{index}-{number}"):
                    tokens += output.outputs[0].token_ids
                    versions = output.outputs[0].weights_versions
                outputs.append((prompt, tokens, versions))
            except WeightsChangedError:
                ended += 1

    async def main() -> None:
        async with AsyncLLM.attach(daemon.address) as llm:
            stop = asyncio.Event()
            streams = [asyncio.create_task(stream(llm, index, stop)) for index in range(8)]
            status = await asyncio.wrap_future(llm.session.call("status"))
            worker, core = psutil.Process(status["worker_pid"]), psutil.Process(daemon.process.pid)
            sizes = []
            for update in range(50):
                number = rng.randrange(NUM_VARIANTS)
                weights = folder / str(number) if rng.random() < 0.5 else tensors_of(folder, number)
                mode = rng.choice(("finish", "recompute", "abort"))
                numbers[await llm.update_weights(weights, requests=mode)] = number  # type: ignore[arg-type]
                if update >= 10:
                    sizes.append(worker.memory_info().rss + core.memory_info().rss)
            stop.set()
            await asyncio.gather(*streams)
            status = await asyncio.wrap_future(llm.session.call("status"))
            assert status["worker_starts"] == 1 and status["weights"] == "50"
            assert status["num_free_blocks"] == status["num_blocks"]
            assert max(sizes[-5:]) - min(sizes[:5]) < 10 * 16_000_000, "40 updates of 16 MB each"
            assert sum(1 for _ in Path(f"/proc/{core.pid}/fd").iterdir()) < 200

    asyncio.run(main())
    for prompt, tokens, versions in outputs:
        assert len(tokens) == 60
        spans = [(0, ""), *versions]
        for (first, name), (end, _) in zip(spans, [*spans[1:], (60, "")], strict=True):
            assert tokens[first:end] == fresh(numbers[name], prompt + tokens[:first], end - first)
    assert ended and len(outputs) > 8
    assert any(len(versions) > 1 for _, _, versions in outputs), "a request that spans versions"


@pytest.mark.parametrize("by_path", [True, False])
def test_a_killed_worker_comes_back_with_the_new_weights(
    tmp_path: Path, folder: Path, fresh: Fresh, by_path: bool
) -> None:
    path = tmp_path / "new.safetensors"
    shutil.copy(folder / "2" / "model.safetensors", path)
    long = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)

    async def main() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs("demo", weights_dir=str(tmp_path), **OPTIONS))
        try:
            await llm.update_weights(path if by_path else tensors_of(folder, 2))
            path.unlink()
            first = await asyncio.wrap_future(llm.session.call("status"))
            tokens: Sequence[int] = ()
            killed = False
            async for output in llm.generate(PROMPTS[1], long, "long"):
                tokens = output.outputs[0].token_ids
                if len(tokens) > 20 and not killed:
                    os.kill(first["worker_pid"], signal.SIGKILL)
                    killed = True
            assert list(tokens) == fresh(2, PROMPTS[1], 150)
            status = await asyncio.wrap_future(llm.session.call("status"))
            assert killed and status["worker_starts"] == 2 and status["weights"] == "1"
        finally:
            llm.shutdown()

    asyncio.run(main())


def test_a_cold_tier_keeps_versions_apart(tmp_path: Path, folder: Path, fresh: Fresh) -> None:
    """Blocks of old weights lie on disk, and are not found; those of the new ones are."""
    prompts = [[random.Random(i).randrange(300, 2000) for _ in range(160)] for i in range(6)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_model_len": 256, "max_num_seqs": 2}
    with LLM("demo", kv_cache_dir=str(tmp_path), weights_dir=str(folder), **options, **OPTIONS) as llm:
        for number in (0, 1, 2, 1):
            if number or llm.session.call("status").result()["weights"]:
                llm.update_weights(folder / str(number))
            expected = [fresh(number, prompt, 40) for prompt in prompts]
            first = llm.generate(prompts, GREEDY, use_tqdm=False)
            again = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in first] == expected
            assert [list(output.outputs[0].token_ids) for output in again] == expected
            assert not any(output.num_cached_tokens for output in first)
        status = llm.session.call("status").result()
        os.kill(status["worker_pid"], signal.SIGKILL)
        assert generate(llm, prompts) == expected


def test_over_http(folder: Path, fresh: Fresh, start_server: Callable[..., Server]) -> None:
    small = ("--dtype", "float32", "--kv-cache-memory-bytes", str(KV_BYTES))
    server = start_server("demo", "--port", "0", *small, "--enable-admin", "--weights-dir", str(folder))
    admin = {"X_Pagewire_Admin": "1"}

    def complete() -> list[int]:
        body = {"model": "demo", "prompt": PROMPTS[2], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        status, answer = server.request("POST", "/v1/completions", body | {"return_token_ids": True})
        assert status == 200
        return list(answer["choices"][0]["token_ids"])

    assert complete() == fresh(0, PROMPTS[2], 40)
    status, answer = server.request("POST", "/update_weights", {"path": "1"}, **admin)
    assert (status, answer) == (200, {"version": "1"})
    body = {"path": str(folder / "2"), "version": "step 2", "requests": "recompute"}
    assert server.request("POST", "/update_weights", body, **admin) == (200, {"version": "step 2"})
    assert complete() == fresh(2, PROMPTS[2], 40)
    for wrong, expected in [
        ({"path": "/etc/passwd"}, 403),
        ({"path": "nowhere"}, 400),
        ({"path": "1", "requests": "later"}, 422),
        ({"path": ""}, 422),
        ({"path": "1", "upload": 1}, 422),
        ({}, 422),
    ]:
        assert server.request("POST", "/update_weights", wrong, **admin)[0] == expected, wrong
    assert server.request("POST", "/update_weights", {"path": "1"})[0] == 403
    assert complete() == fresh(2, PROMPTS[2], 40)


def test_embeddings_say_their_weights(folder: Path) -> None:
    options: dict[str, Any] = {"runner": "pooling", "convert": "embed", **OPTIONS}
    with LLM("demo", weights_dir=str(folder), **options) as llm, LLM(str(folder / "1"), **options) as other:
        before = llm.encode([PROMPTS[0]], PoolingParams(task="embed"), use_tqdm=False)[0]
        llm.update_weights(folder / "1")
        after = llm.encode([PROMPTS[0]], PoolingParams(task="embed"), use_tqdm=False)[0]
        expected = other.encode([PROMPTS[0]], PoolingParams(task="embed"), use_tqdm=False)[0]
        assert (before.weights_version, after.weights_version) == ("", "1")
        assert after.outputs == expected.outputs != before.outputs
