"""Real engines with LoRA adapters: tokens are those of transformers with the adapters added to the weights."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagewire import LLM, AsyncLLM, LoRARequest, SamplingParams
from tests.frontend.server.client import Client
from tests.workers.architectures import COMMON, GROUPED, VOCAB_SIZE, Architecture
from tests.workers.parity import make_prompts, transformers_tokens

LLAMA = Architecture("llama", GROUPED)
NUM_TOKENS = 8
PROMPTS = make_prompts(VOCAB_SIZE, (40, 40, 5))
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
ADMIN = {"X-Pagewire-Admin": "1"}


def matrices(rank: int, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Both matrices of each weight that an adapter changes, by the name of its module."""
    generator = torch.Generator().manual_seed(seed)
    hidden, kv = COMMON["hidden_size"], GROUPED["num_key_value_heads"] * GROUPED["head_dim"]
    return {
        f"model.layers.{layer}.self_attn.{name}": (
            torch.randn((rank, hidden), generator=generator) * 0.3,
            torch.randn((size, rank), generator=generator) * 0.3,
        )
        for layer in range(COMMON["num_hidden_layers"])
        for name, size in (("q_proj", hidden), ("v_proj", kv))
    }


def write_adapter(folder: Path, rank: int, seed: int) -> Path:
    """An adapter in PEFT's format, with alpha = 2 * rank."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (down, up) in matrices(rank, seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["q_proj", "v_proj"]}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder


def merged_tokens(model: Path, folder: Path, rank: int, seed: int) -> list[list[int]]:
    """What transformers generates with the adapter added to the weights."""
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        for name, (down, up) in matrices(rank, seed).items():
            merged.get_submodule(name).weight += 2 * up @ down
    merged.save_pretrained(folder)
    return transformers_tokens(folder, PROMPTS, NUM_TOKENS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def root(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the adapters 0 and 1, of rank 4 and 6."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, rank in enumerate((4, 6)):
        write_adapter(root / str(seed), rank, seed)
    return root


@pytest.fixture(scope="module")
def expected(model: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """The tokens after each prompt, of the model and with each adapter."""
    tokens = {"": transformers_tokens(model, PROMPTS, NUM_TOKENS)}
    for seed, rank in enumerate((4, 6)):
        tokens[str(seed)] = merged_tokens(model, tmp_path_factory.mktemp("merged"), rank, seed)
    assert len({json.dumps(each) for each in tokens.values()}) == 3
    return tokens


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "skip_tokenizer_init": True}
    with LLM(str(model), dtype="float32", kv_cache_memory_bytes=8 << 20, **options) as llm:
        yield llm


def tokens_of(llm: LLM, adapters: list[LoRARequest | None]) -> list[list[list[int]]]:
    """The tokens after each prompt with each of the adapters, all in one batch."""
    prompts = [prompt for _ in adapters for prompt in PROMPTS]
    each = [adapter for adapter in adapters for _ in PROMPTS]
    outputs = llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False)
    assert [output.lora_request for output in outputs] == each
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return [found[i : i + len(PROMPTS)] for i in range(0, len(found), len(PROMPTS))]


def test_two_adapters_and_the_model_in_one_batch(
    llm: LLM, root: Path, expected: dict[str, list[list[int]]]
) -> None:
    adapters = [LoRARequest("first", 1, str(root / "0")), None, LoRARequest("second", 2, str(root / "1"))]
    assert tokens_of(llm, adapters) == [expected["0"], expected[""], expected["1"]]
    assert llm.list_loras() == [1, 2]
    (again,) = llm.generate([PROMPTS[0]], GREEDY, lora_request=LoRARequest("alias", 3, str(root / "0")))
    assert list(again.outputs[0].token_ids) == expected["0"][0]
    assert again.num_cached_tokens == 32  # two names of one adapter share its blocks


def test_a_replaced_adapter_is_read_anew_and_finds_nothing_cached(
    llm: LLM, root: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    folder = shutil.copytree(root / "0", tmp_path / "changing")
    adapter = LoRARequest("changing", 4, str(folder))
    assert tokens_of(llm, [adapter]) == [expected["0"]]
    for file in (root / "1").iterdir():
        shutil.copy(file, tmp_path / "new")
        (tmp_path / "new").replace(folder / file.name)
    outputs = llm.generate(list(PROMPTS), GREEDY, lora_request=adapter, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected["1"]
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="no adapter folder"):
        llm.generate(list(PROMPTS), GREEDY, lora_request=adapter, use_tqdm=False)


def test_no_token_changes_when_the_worker_is_killed(llm: LLM, root: Path) -> None:
    adapters = [LoRARequest("first", 1, str(root / "0")), None, LoRARequest("second", 2, str(root / "1"))]
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)

    def run(kills: bool) -> list[list[int]]:
        engine, tokens = llm.llm_engine, dict[str, list[int]]()
        for index, adapter in enumerate(adapters):
            engine.add_request(f"{kills} {index}", PROMPTS[0], params, lora_request=adapter)
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if kills and len(tokens) == len(adapters):
                kills = False
                os.kill(engine.session.call("status").result()["worker_pid"], signal.SIGKILL)
        return [tokens[name] for name in sorted(tokens)]

    assert run(kills=True) == run(kills=False)
    while llm.llm_engine.session.call("status").result()["worker_starts"] < 2:
        pass  # the requests may have ended before the worker


def test_a_bad_adapter_is_refused_and_disturbs_nothing(
    llm: LLM, root: Path, expected: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    folder = shutil.copytree(root / "0", tmp_path / "bad")
    tensors = folder / "adapter_model.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    with pytest.raises(ValueError, match="adapter 'bad'"):
        llm.add_lora(LoRARequest("bad", 9, str(folder)))
    good = LoRARequest("first", 1, str(root / "0"))
    assert llm.add_lora(good) and llm.pin_lora(1)
    with pytest.raises(RuntimeError, match="adapter 'bad'"):
        llm.generate([PROMPTS[0]] * 2, GREEDY, lora_request=[LoRARequest("bad", 9, str(folder)), good])
    assert tokens_of(llm, [LoRARequest("first", 1)]) == [expected["0"]]  # by its name alone
    assert llm.remove_lora(1) and not llm.remove_lora(9)


def test_adapters_over_http(llm: LLM, root: Path, expected: dict[str, list[list[int]]]) -> None:
    engine = AsyncLLM(llm.llm_engine.session)
    client = Client(engine, lora_modules=[f"zero={root / '0'}"], enable_admin=True, lora_root=str(root))
    body = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}

    def completed(name: str) -> Any:
        answer = client.post("/v1/completions", body | {"model": name})
        return answer.json["choices"][0]["token_ids"] if answer.status == 200 else answer.status

    load = {"lora_name": "one", "lora_path": "1"}
    assert completed("zero") == expected["0"][0] and completed("one") == 404
    assert client.post("/v1/load_lora_adapter", load, **ADMIN).json["parent"] == Path(engine.info.model).name
    assert completed("one") == expected["1"][0]
    assert client.post("/v1/unload_lora_adapter", {"lora_name": "one"}, **ADMIN).status == 200
    assert completed("one") == 404 and completed(engine.info.model) == expected[""][0]
