"""Prompts of embeddings, and prompt adapters, as frontends make requests of them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.requests.embeds import as_tensor
from pagewire.frontend.requests.inputs import Intake, Prepared
from pagewire.frontend.requests.learned_prompts import PromptAdapters
from pagewire.frontend.requests.outputs import RequestState
from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.messages import EngineInfo, TokenDelta
from pagewire.ipc.wire.params import SamplingParams
from tests.frontend.conftest import FakeCore

BOTH = EmbeddingsInfo(size=4, prompts=True, adapters=True, max_adapters=2, max_adapter_tokens=50)
ROWS = torch.arange(12.0).view(3, 4)


def intake_of(info: EngineInfo, embeddings: EmbeddingsInfo = BOTH) -> Intake:
    return Intake(msgspec.structs.replace(info, embeddings=embeddings), None)


def prepare(info: EngineInfo, prompt: Any, embeddings: EmbeddingsInfo = BOTH, **params: Any) -> Prepared:
    return intake_of(info, embeddings).prepare(prompt, SamplingParams(**params), "r")


class OnlyArray:
    """An array of another library, such as JAX."""

    def __array__(self) -> Any:
        return ROWS.numpy()


class Half:
    """An array of a dtype that has no format, as ml_dtypes have it."""

    dtype = "bfloat16"

    class Memory:
        dtype = "bfloat16"

        def view(self, dtype: str) -> Any:
            assert dtype == "uint16"
            return ROWS.bfloat16().view(torch.int16).numpy().view("uint16")

    def __array__(self) -> Any:
        return self.Memory()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (ROWS, "float32"),
        (ROWS.bfloat16(), "bfloat16"),
        (ROWS.half(), "float16"),
        (ROWS.t().contiguous().t(), "float32"),
        (torch.nn.Parameter(ROWS), "float32"),
        (ROWS.numpy(), "float32"),
        (np.asfortranarray(ROWS.numpy()), "float32"),
        (np.float16(ROWS.numpy()), "float16"),
        (memoryview(ROWS.numpy()), "float32"),
        (OnlyArray(), "float32"),
        (Half(), "bfloat16"),
        (Tensor("float32", (3, 4), ROWS.numpy().tobytes()), "float32"),
    ],
)
def test_tensors_of_any_library_are_copied(value: Any, dtype: str) -> None:
    found = as_tensor(value)
    assert (found.dtype, found.shape) == (dtype, (3, 4))
    values = torch.frombuffer(bytearray(found.data), dtype=getattr(torch, dtype)).view(3, 4)
    assert torch.equal(values.float(), ROWS)


@pytest.mark.parametrize(
    "value",
    [
        [[1.0, 2.0]],
        "text",
        b"bytes",
        5,
        object(),
        np.zeros((1, 4), int),
        torch.zeros(1, 4, dtype=torch.int64),
    ],
)
def test_what_is_no_tensor_of_numbers_is_refused(engine_info: EngineInfo, value: Any) -> None:
    with pytest.raises(TypeError, match="prompt_embeds must be a tensor or array of float32"):
        prepare(engine_info, {"prompt_embeds": value})


def test_frontends_take_arrays_without_importing_their_libraries() -> None:
    program = (
        "import array, sys\n"
        "from pagewire.frontend.requests.embeds import as_tensor\n"
        "view = memoryview(array.array('f', range(12))).cast('B').cast('f', [3, 4])\n"
        "assert as_tensor(view).shape == (3, 4)\n"
        "assert not {'numpy', 'torch'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_a_prompt_of_embeddings_becomes_placeholders_and_media(engine_info: EngineInfo) -> None:
    prompt = {"prompt_embeds": ROWS[None], "cache_salt": "s"}
    prepared = prepare(engine_info, prompt)
    content = prepared.request.prompt
    assert (content.token_ids, content.cache_salt, prepared.prompt_text) == ([0, 0, 0], "s", None)
    (medium,) = content.media
    assert (medium.start, medium.num_tokens, bytes(medium.data.data)) == (0, 3, ROWS.numpy().tobytes())
    assert prepared.request.params.max_tokens == 16
    again = prepare(engine_info, {"prompt_embeds": ROWS.numpy()}).request.prompt.media
    assert again == content.media
    half = prepare(engine_info, {"prompt_embeds": ROWS.half()}).request.prompt.media
    assert half[0].name != medium.name


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ({"prompt_embeds": ROWS, "prompt": "a"}, {}, "give prompt_embeds or prompt, not both"),
        ({"prompt_embeds": ROWS, "prompt_token_ids": [1]}, {}, "prompt_embeds or prompt_token_ids, not both"),
        ({"prompt_embeds": ROWS, "cache_sult": "a"}, {}, "cache_salt"),
        ({"prompt_embeds": ROWS, "multi_modal_data": {"image": 1}}, {}, "takes no pictures"),
        ({"prompt_embeds": ROWS[:, :3]}, {}, "must have the shape .number of tokens, 4."),
        ({"prompt_embeds": ROWS[:0]}, {}, "shape"),
        ({"prompt_embeds": ROWS.double()}, {}, "must be float32, bfloat16 or float16, got float64"),
        ({"prompt_embeds": ROWS / 0}, {}, "NaN, infinite"),
        ({"prompt_embeds": torch.zeros(5000, 4)}, {}, "maximum context length is 4096.*5000 embeddings"),
        ({"prompt_embeds": torch.zeros(4096, 4)}, {}, "leaves no room"),
        ({"prompt_embeds": ROWS}, {"prompt_logprobs": 1}, "prompt_logprobs does not go with prompt_embeds"),
        ({"prompt_embeds": ROWS}, {"truncate_prompt_tokens": 1}, "truncate_prompt_tokens does not go with"),
    ],
)
def test_bad_embeddings_are_refused(
    engine_info: EngineInfo, prompt: Any, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        prepare(engine_info, prompt, **params)


def test_engines_that_take_none_say_which_option_would(engine_info: EngineInfo, tmp_path: Path) -> None:
    for info in (EmbeddingsInfo(size=4), EmbeddingsInfo(size=4, adapters=True)):
        with pytest.raises(
            ValueError, match=r"start it with enable_prompt_embeds=True \(--enable-prompt-embeds\)"
        ):
            prepare(engine_info, {"prompt_embeds": ROWS}, info)
    with pytest.raises(ValueError, match=r"enable_prompt_adapter=True \(--enable-prompt-adapter\)"):
        PromptAdapters(EmbeddingsInfo(size=4, prompts=True)).get(adapter(tmp_path))


def test_what_needs_tokens_refuses_embeddings(engine_info: EngineInfo) -> None:
    """Such as beam search."""
    with pytest.raises(ValueError, match="prompt_embeds: a prompt of embeddings has no tokens"):
        intake_of(engine_info).tokenize({"prompt_embeds": ROWS})


# ---------------------------------------------------------------- prompt adapters


def adapter(
    folder: Path, rows: torch.Tensor = ROWS, config: dict[str, Any] | None = None, **more: torch.Tensor
) -> PromptAdapterRequest:
    """An adapter as PEFT writes it, in `folder`."""
    folder.mkdir(exist_ok=True)
    settings = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": len(rows)}
    settings |= {"token_dim": rows.shape[-1], "num_transformer_submodules": 1}
    (folder / "adapter_config.json").write_text(json.dumps(settings | (config or {})))
    save_file({"prompt_embeddings": rows, **more}, folder / "adapter_model.safetensors")
    return PromptAdapterRequest("tuned", 1, str(folder))


def test_an_adapter_is_before_the_prompt_and_outputs_do_not_show_it(
    engine_info: EngineInfo, tmp_path: Path
) -> None:
    tuned = adapter(tmp_path)
    intake = intake_of(engine_info)
    params = SamplingParams(max_tokens=5000, prompt_logprobs=0)
    prepared = intake.prepare([7, 8, 9], params, "r", prompt_adapter_request=tuned)
    content = prepared.request.prompt
    assert content.token_ids == [0, 0, 0, 7, 8, 9] and [(m.start, m.end) for m in content.media] == [(0, 3)]
    assert prepared.request.params.max_tokens == 4096 - 6
    both = intake.prepare({"prompt_embeds": ROWS}, SamplingParams(), "r", prompt_adapter_request=tuned)
    assert [(m.start, m.end) for m in both.request.prompt.media] == [(0, 3), (3, 6)]

    state = RequestState(prepared.request, None, None, num_virtual_tokens=prepared.num_virtual_tokens)
    for first, count in ((0, 2), (2, 3)):
        state.apply(TokenDelta(1, 0, [], prompt_logprobs=logprobs(range(first, first + count))))
    assert state.num_prompt_logprobs == 5  # as the core counts, should the request go on with another one
    state.apply(TokenDelta(1, 0, [5], "length", num_cached_tokens=4))
    output = state.take()
    assert output is not None and output.prompt_token_ids == [7, 8, 9]
    assert output.num_cached_tokens == 1 and output.prompt_logprobs is not None
    assert [position and list(position) for position in output.prompt_logprobs] == [None, [13], [14]]


def logprobs(positions: range) -> LogprobRows:
    n = len(positions)
    ids = np.array([10 + i for i in positions], np.int32)
    return LogprobRows(
        Tensor("int32", (n, 1), ids.tobytes()),
        Tensor("float32", (n, 1), bytes(4 * n)),
        Tensor("int32", (n,), bytes(4 * n)),
    )


def test_adapters_are_read_once_and_again_when_their_files_change(tmp_path: Path) -> None:
    adapters = PromptAdapters(BOTH)
    request = adapter(tmp_path / "a")
    first = adapters.get(request)
    assert adapters.get(request) is first
    adapter(tmp_path / "a", ROWS + 1)
    os.utime(tmp_path / "a" / "adapter_model.safetensors", ns=(5, 5))
    second = adapters.get(request)
    assert second.media[0].name != first.media[0].name
    copy = adapters.get(adapter(tmp_path / "b", ROWS + 1))
    assert (
        copy is not second and copy.media == second.media
    )  # two names of one content share its keys and values
    adapters.get(adapter(tmp_path / "c"))
    assert adapters.get(request) is not second  # two are kept


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"peft_type": "PREFIX_TUNING"},
            "keys and values for each layer.*train with PROMPT_TUNING or P_TUNING",
        ),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "depend on the task of each input"),
        ({"peft_type": "LORA"}, "changes the model's weights: give it as lora_request"),
        ({"peft_type": "IA3"}, "'IA3': it is no prompt adapter"),
        ({"peft_type": None}, "it has no type"),
        ({"task_type": "SEQ_CLS"}, "only adapters that generate text"),
        ({"num_transformer_submodules": 2}, "an encoder and a decoder"),
        ({"num_virtual_tokens": 4}, "it has 3 virtual tokens, but adapter_config.json says 4"),
    ],
)
def test_adapters_of_other_kinds_are_refused_by_name(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"the prompt adapter 'tuned' cannot be used: .*{message}"):
        PromptAdapters(BOTH).get(adapter(tmp_path, config=config))


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_results_of_both_trainings_are_embeddings(tmp_path: Path, kind: str) -> None:
    config = {"peft_type": kind, "task_type": None}
    assert PromptAdapters(BOTH).get(adapter(tmp_path, config=config)).num_virtual_tokens == 3


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        (torch.zeros(3, 5), {}, "embeddings of this model have 4 numbers; got .3, 5."),
        (torch.zeros(51, 4), {}, "51 virtual tokens are over max_prompt_adapter_token=50"),
        (ROWS * float("nan"), {}, "prompt_embeddings have a number that is NaN"),
        (ROWS.double(), {}, "prompt_embeddings must be float32"),
        (ROWS, {"classifier.weight": ROWS}, "other weights than prompt_embeddings: .'classifier.weight'."),
    ],
)
def test_bad_adapters_are_refused(
    tmp_path: Path, rows: torch.Tensor, more: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PromptAdapters(BOTH).get(adapter(tmp_path, rows, **{name: x.clone() for name, x in more.items()}))


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    adapters = PromptAdapters(BOTH)
    with pytest.raises(ValueError, match=r"there is no adapter_config.json in"):
        adapters.get(PromptAdapterRequest("none", 1, str(tmp_path / "none")))
    request = adapter(tmp_path / "a")
    weights = tmp_path / "a" / "adapter_model.safetensors"
    content = weights.read_bytes()
    for size in range(0, len(content), 7):
        weights.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"'tuned' cannot be used: adapter_model.safetensors: "):
            adapters.get(request)
    weights.rename(tmp_path / "a" / "adapter_model.bin")
    with pytest.raises(
        ValueError, match=r"adapter_model.bin is a pickle, which can run code and is not read"
    ):
        adapters.get(request)
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        adapters.get(request)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (("", 1, "a"), ValueError),
        (("a", 0, "a"), ValueError),
        ((1, 1, "a"), TypeError),
        (("a", "1", "a"), TypeError),
        (("a", 1, ""), ValueError),
        (("a", 1, "b", -1), ValueError),
    ],
)
def test_requests_for_adapters_check_themselves(fields: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error, match="prompt_adapter_"):
        PromptAdapterRequest(*fields)


def test_a_request_may_say_how_many_virtual_tokens_it_expects(tmp_path: Path) -> None:
    adapter(tmp_path)
    adapters = PromptAdapters(BOTH)
    assert adapters.get(PromptAdapterRequest("a", 1, str(tmp_path), 3)).num_virtual_tokens == 3
    with pytest.raises(
        ValueError, match="prompt_adapter_num_virtual_tokens=4, but the prompt adapter 'a' has 3"
    ):
        adapters.get(PromptAdapterRequest("a", 1, str(tmp_path), 4))
    with pytest.raises(TypeError, match="must be a PromptAdapterRequest, got str"):
        adapters.get("a")  # type: ignore[arg-type]


def test_files_of_adapters_are_not_read_on_the_event_loop(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, threads = AsyncLLM.attach(core.address), list[threading.Thread]()

    def get(request: PromptAdapterRequest) -> None:
        threads.append(threading.current_thread())
        raise ValueError("read")

    async def generate() -> None:
        async for _ in engine.generate("w2", prompt_adapter_request=PromptAdapterRequest("a", 1, "/a")):
            pass

    monkeypatch.setattr(engine.session.intake.prompt_adapters, "get", get)
    with pytest.raises(ValueError, match="read"):
        asyncio.run(generate())
    engine.shutdown()
    assert threads and threading.main_thread() not in threads


def test_options_name_the_adapters_of_a_server(tmp_path: Path) -> None:
    adapter(tmp_path / "a")
    adapters = PromptAdapters(BOTH)
    (named,) = adapters.named([f"tuned={tmp_path}/a"], ["demo"]).items()
    assert named == ("tuned", PromptAdapterRequest("tuned", 1, f"{tmp_path}/a", 3))
    for options, message in (
        (["tuned"], "must be NAME=FOLDER, got 'tuned'"),
        (["=a"], "NAME=FOLDER"),
        ([f"demo={tmp_path}/a"], "the name 'demo' is given twice"),
        ([f"a={tmp_path}/a"] * 2, "the name 'a' is given twice"),
        (["a=/nothing"], "no adapter_config.json"),
    ):
        with pytest.raises(ValueError, match=message):
            adapters.named(options, ["demo"])
