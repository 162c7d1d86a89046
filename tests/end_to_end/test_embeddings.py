"""Prompts of embeddings and prompt adapters, through core, worker and server, on the demo model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import pagewire
from pagewire import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    LoRARequest,
    PromptAdapterRequest,
    RequestOutputKind,
    SamplingParams,
)
from tests.end_to_end.conftest import Daemon
from tests.frontend.server.client import Client

PROMPT = list(range(300, 340))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    """The embeddings [V, 256] of the demo model's tokens."""
    tensors = load_file(Path(pagewire.__file__).parent / "demo" / "model.safetensors")
    return tensors["model.embed_tokens.weight"].float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, table: torch.Tensor) -> Path:
    """A prompt adapter of 40 virtual tokens, which are those of a text."""
    folder = tmp_path_factory.mktemp("adapter")
    settings = {"peft_type": "P_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 40, "token_dim": 256}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    save_file({"prompt_embeddings": table[PROMPT].contiguous()}, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A core that takes both, and LoRA adapters."""
    address = f"ipc://{tmp_path_factory.mktemp('core')}/core.sock"
    options = ("--enable-prompt-embeds", "--enable-prompt-adapter", "--enable-lora")
    daemon = Daemon(address, *options, "--max-num-batched-tokens", "32")
    yield address
    assert daemon.stop() == 0


@pytest.fixture
def llm(core: str) -> Iterator[LLM]:
    with LLM.attach(core) as llm:
        yield llm


@pytest.fixture
def expected(llm: LLM) -> list[int]:
    """What follows the tokens, before anything of them is cached."""
    (output,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def test_embeddings_of_tokens_are_as_good_as_tokens(
    llm: LLM, table: torch.Tensor, expected: list[int]
) -> None:
    rows = table[PROMPT]
    prompts: list[Any] = [{"prompt_embeds": x} for x in (rows, rows.numpy(), rows[None])]
    first, second, third = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output in (first, second, third):
        assert output.outputs[0].token_ids == expected
        assert (output.prompt, output.prompt_token_ids) == (None, [0] * len(PROMPT))
    (again,) = llm.generate(prompts[:1], GREEDY, use_tqdm=False)
    assert (again.num_cached_tokens, again.outputs[0].token_ids) == (32, expected)
    salted: Any = {"prompt_embeds": rows, "cache_salt": "own"}
    (own,) = llm.generate([salted], GREEDY, use_tqdm=False)
    assert (own.num_cached_tokens, own.outputs[0].token_ids) == (0, expected)
    (text,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    stop = SamplingParams(temperature=0.0, max_tokens=12, n=3, stop=[text.outputs[0].text[5:8]])
    (stopped,) = llm.generate(prompts[:1], stop, use_tqdm=False)
    (plain,) = llm.generate([PROMPT], stop, use_tqdm=False)
    assert [o.text for o in stopped.outputs] == [o.text for o in plain.outputs]
    assert {o.stop_reason for o in stopped.outputs} == set(stop.stop_strings)


def test_what_makes_no_sense_is_refused_by_name(llm: LLM, table: torch.Tensor) -> None:
    prompt: Any = {"prompt_embeds": table[PROMPT]}
    with pytest.raises(ValueError, match="prompt_embeds: a prompt of embeddings has no tokens"):
        llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=3))
    with pytest.raises(ValueError, match=r"embeddings of this model have 256 numbers; got \[40, 127\]"):
        llm.generate([{"prompt_embeds": table[PROMPT, :127]}], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="generates text and does not pool"):
        llm.embed([prompt])  # type: ignore[list-item]


def prompt_tokens(llm: LLM) -> float:
    """Prompt tokens that the core has computed."""
    (metric,) = [metric for metric in llm.get_metrics() if metric.name == "vllm:prompt_tokens"]
    return metric.value  # type: ignore[attr-defined, no-any-return]


def test_an_adapters_second_request_computes_nothing_for_its_full_blocks(
    core: str, llm: LLM, folder: Path
) -> None:
    adapter = PromptAdapterRequest("tuned", 1, str(folder), 40)
    (plain,) = llm.generate([[*PROMPT, 7, 8, 9]], GREEDY, use_tqdm=False)
    (first,) = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False, prompt_adapter_request=adapter)
    computed = prompt_tokens(llm)
    with LLM.attach(core) as other:
        (second,) = other.generate([[5, 6]], GREEDY, use_tqdm=False, prompt_adapter_request=adapter)
    assert prompt_tokens(llm) - computed == 42 - 32
    assert first.outputs[0].token_ids == plain.outputs[0].token_ids
    assert (first.prompt_token_ids, second.prompt_token_ids) == ([7, 8, 9], [5, 6])
    assert second.num_cached_tokens == 0  # of the prompt itself
    echo = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (whole,) = llm.generate([[*PROMPT, 7, 8, 9]], echo, use_tqdm=False)
    (tuned,) = llm.generate([[7, 8, 9]], echo, use_tqdm=False, prompt_adapter_request=adapter)
    assert whole.prompt_logprobs is not None and tuned.prompt_logprobs is not None
    assert tuned.prompt_logprobs == [None, *whole.prompt_logprobs[-2:]]
    chat = llm.chat(
        [{"role": "user", "content": "Hello"}], GREEDY, use_tqdm=False, prompt_adapter_request=adapter
    )
    assert len(chat[0].outputs[0].token_ids) == 12


@pytest.fixture
def lora(tmp_path: Path) -> LoRARequest:
    """An adapter of all query projections."""
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": 0.3
        * torch.randn(shape, generator=generator)
        for layer in range(4)
        for part, shape in (("A", (4, 256)), ("B", (256, 4)))
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest("lora", 7, str(tmp_path))


def test_they_go_with_adapters(
    llm: LLM, table: torch.Tensor, folder: Path, expected: list[int], lora: LoRARequest
) -> None:
    """Blocks of embeddings are an adapter's own, too."""
    virtual = PromptAdapterRequest("tuned", 1, str(folder))
    rows: Any = {"prompt_embeds": table[[*PROMPT, 7, 8]]}
    (tokens,) = llm.generate([[*PROMPT, 7, 8]], GREEDY, use_tqdm=False, lora_request=lora)
    (tuned,) = llm.generate(
        [[7, 8]], GREEDY, use_tqdm=False, lora_request=lora, prompt_adapter_request=virtual
    )
    first, again = (llm.generate([rows], GREEDY, use_tqdm=False, lora_request=lora)[0] for _ in range(2))
    for output in (tuned, first, again):
        assert output.outputs[0].token_ids == tokens.outputs[0].token_ids
        assert output.lora_request == lora
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    (plain,) = llm.generate([rows], GREEDY, use_tqdm=False)
    assert plain.outputs[0].token_ids != tokens.outputs[0].token_ids


def test_a_killed_worker_changes_nothing(core: str, table: torch.Tensor, folder: Path) -> None:
    params = SamplingParams(seed=5, max_tokens=60, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    requests: list[tuple[Any, PromptAdapterRequest | None]] = [
        ({"prompt_embeds": table[PROMPT] * 1.25}, None),
        ([7, 8, 9], PromptAdapterRequest("tuned", 1, str(folder))),
        (PROMPT[::-1], None),
    ]

    async def stream(
        llm: AsyncLLM, prompt: Any, adapter: PromptAdapterRequest | None, kill: bool
    ) -> list[int]:
        tokens: list[int] = []
        async for output in llm.generate(prompt, params, prompt_adapter_request=adapter):
            tokens += output.outputs[0].token_ids
            if kill and len(tokens) >= 10:
                kill = False
                status = await asyncio.wrap_future(llm.session.call("status"))
                os.kill(status["worker_pid"], signal.SIGKILL)
        return tokens

    async def main() -> None:
        async with AsyncLLM.attach(core) as llm:
            alone = [await stream(llm, *request, kill=False) for request in requests]
            streams = (stream(llm, *request, kill=not i) for i, request in enumerate(requests))
            assert await asyncio.gather(*streams) == alone

    asyncio.run(main())


@contextmanager
def attached(address: str) -> Iterator[AsyncLLM]:
    llm = AsyncLLM.attach(address)
    yield llm
    llm.shutdown()


def in_base64(tensor: torch.Tensor) -> str:
    return base64.b64encode(save({"any": tensor.contiguous()})).decode()


def test_over_http(core: str, table: torch.Tensor, folder: Path) -> None:
    """Embeddings come first, then what `prompt` has; adapters are models."""
    rows = table[PROMPT]
    body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "prompt_embeds": in_base64(rows)}
    pickled = io.BytesIO()
    torch.save(rows, pickled)
    refused: list[tuple[dict[str, Any], str]] = [
        (
            {"prompt_embeds": base64.b64encode(pickled.getvalue()).decode()},
            "a pickle.*safetensors.torch.save",
        ),
        ({"prompt_embeds": "?" * 8}, "not base64"),
        ({"prompt_embeds": "ZGVtbw=="}, "no safetensors file"),
        (
            {"prompt_embeds": base64.b64encode(save({"a": rows, "b": rows + 1})).decode()},
            "one tensor, but it has 2",
        ),
        ({"prompt_embeds": in_base64(rows[:, :5])}, "have 256 numbers; got .40, 5."),
        ({"prompt_embeds": in_base64(rows / 0)}, "NaN"),
        ({"prompt_embeds": []}, "1 to 1024 prompts, got 0"),
        ({"echo": True}, "echo does not go with prompt_embeds"),
        ({"prompt_logprobs": 0}, "prompt_logprobs does not go with prompt_embeds"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens does not go with prompt_embeds"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search does not go with prompt_embeds"),
    ]

    with attached(core) as llm:
        client = Client(llm, prompt_adapters=[f"tuned={folder}"])
        both = client.post("/v1/completions", {**body, "prompt": PROMPT, "logprobs": 1})
        texts = [choice["text"] for choice in both.json["choices"]]
        assert texts[0] == texts[1] and both.json["usage"]["prompt_tokens"] == 80
        several = client.post("/v1/completions", {**body, "prompt_embeds": [in_base64(rows)] * 2})
        assert [choice["text"] for choice in several.json["choices"]] == texts
        for fields, message in refused:
            answer = client.post("/v1/completions", {**body, **fields})
            assert answer.status == 400, fields
            assert re.search(message, answer.error["message"]), answer.error
        missing = client.post("/v1/completions", {"max_tokens": 1})
        assert (missing.status, missing.error["param"]) == (422, "prompt")

        models = client.get("/v1/models").json["data"]
        assert [(m["id"], m["parent"], m["root"]) for m in models] == [
            ("demo", None, "demo"),
            ("tuned", "demo", str(folder)),
        ]
        assert client.get("/v1/models/tuned").json == models[1]
        question = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        whole = client.post("/v1/completions", {**question, "prompt": [*PROMPT, 7, 8]})
        tuned = client.post("/v1/completions", {**question, "prompt": [7, 8], "model": "tuned"})
        assert tuned.json["choices"][0]["text"] == whole.json["choices"][0]["text"]
        assert (tuned.json["model"], tuned.json["usage"]["prompt_tokens"]) == ("tuned", 2)
        beams = {"prompt": [7, 8], "use_beam_search": True, "n": 2, "max_tokens": 3}
        tuned = client.post("/v1/completions", {**beams, "model": "tuned"})
        whole = client.post("/v1/completions", {**beams, "prompt": [*PROMPT, 7, 8]})
        assert [c["text"] for c in tuned.json["choices"]] == [c["text"] for c in whole.json["choices"]]
        chat = {"messages": [{"role": "user", "content": "Hello"}], "model": "tuned", "max_tokens": 4}
        answer = client.post("/v1/chat/completions", chat)
        assert (answer.status, answer.json["model"]) == (200, "tuned")
        response = client.post("/v1/responses", {"input": "Hello", "model": "tuned", "max_output_tokens": 4})
        assert (response.status, response.json["model"]) == (200, "tuned")


def test_engines_that_take_none_say_so(address: str, table: torch.Tensor, folder: Path) -> None:
    with attached(address) as llm:
        answer = Client(llm).post("/v1/completions", {"prompt_embeds": in_base64(table[:3])})
        assert answer.status == 400 and "--enable-prompt-embeds" in answer.error["message"]
        with pytest.raises(ValueError, match="--enable-prompt-adapter"):
            Client(llm, prompt_adapters=[f"tuned={folder}"])
