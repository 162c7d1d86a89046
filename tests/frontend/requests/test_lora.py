"""Adapters as programs name them: checks, folders, versions and tokenizers; and what the core gets of them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pagewire
from pagewire.frontend.api.llm import LLM
from pagewire.frontend.core.custody import request_to_resume
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.requests import adapter_book
from pagewire.frontend.requests.adapter_book import AdapterBook
from pagewire.frontend.requests.lora import LoRARequest, for_each
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.messages import EngineInfo, Request, Submit
from pagewire.ipc.wire.params import BeamSearchParams, SamplingParams
from tests.frontend.conftest import FakeCore


@pytest.fixture
def engine_info(engine_info: EngineInfo) -> EngineInfo:
    """An engine that serves adapters."""
    return msgspec.structs.replace(engine_info, lora=LoRAConfig(max_loras=4, extra_vocab_size=8))


@pytest.fixture
def new(tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of an adapter; tokenizer: a folder whose tokenizer it has, too."""

    def make(name: str = "adapter", tokenizer: Path | None = None) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        for path in tokenizer.glob("tokenizer*") if tokenizer else ():
            shutil.copy(path, folder)
        return folder

    return make


@pytest.fixture
def llm(core: FakeCore) -> Iterator[LLM]:
    """Offline inference on the fake core."""
    core.auto = True
    llm = LLM.attach(core.address)
    yield llm
    llm.shutdown()


def submitted(core: FakeCore) -> Request:
    """The next request that the core gets."""
    (request,) = core.expect(Submit).requests
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        (("", 1, "p"), ValueError, "lora_name must not be empty"),
        (("a", 0, "p"), ValueError, "lora_int_id must be"),
        (("a", "1", "p"), TypeError, "lora_int_id must be an integer"),
        (("a", 1, b"p"), TypeError, "lora_path must be a string"),
        (("a", 1, "p", "q"), ValueError, "contradict"),
    ],
)
def test_bad_fields(fields: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LoRARequest(*fields)


def test_a_request_has_the_names_that_programs_know() -> None:
    request = LoRARequest("sql", 3, lora_local_path="/adapters/sql")
    assert (request.name, request.adapter_id, request.path) == ("sql", 3, "/adapters/sql")
    assert request.local_path == request.lora_path and request == LoRARequest(
        lora_name="sql", lora_int_id=3, lora_path="/adapters/sql", lora_local_path="/adapters/sql"
    )
    from pagewire.engine.arg_utils import EngineArgs
    from pagewire.inputs import TextPrompt
    from pagewire.lora.request import LoRARequest as Found
    from pagewire.outputs import RequestOutput
    from pagewire.sampling_params import SamplingParams as Params

    homes = [Found, EngineArgs, TextPrompt, RequestOutput, Params]
    assert homes == [getattr(pagewire, kind.__name__) for kind in homes]


def test_a_source_has_another_version_when_a_file_was_replaced(
    engine_info: EngineInfo, new: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    book, folder = AdapterBook(engine_info), new()
    monkeypatch.chdir(folder.parent)
    request = LoRARequest("a", 1, "./adapter")
    first = book.source(request)
    assert (
        first.path == str(folder) and book.source(LoRARequest("b", 2, str(folder))).version == first.version
    )
    (folder / "new.json").write_text("{}")
    (folder / "new.json").replace(folder / "adapter_config.json")
    assert book.source(request).version != first.version


def test_what_is_no_adapter_of_this_engine_is_refused(
    engine_info: EngineInfo, new: Callable[..., Path]
) -> None:
    book = AdapterBook(engine_info)
    with pytest.raises(ModelNotFoundError, match="no adapter folder '/no/such'"):
        book.use(LoRARequest("a", 1, "/no/such"))
    folder = new()
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="holds no adapter_config"):
        book.use(LoRARequest("a", 1, str(folder)))
    with pytest.raises(ValueError, match="for the model 'other', but this engine serves \\['fake'\\]"):
        book.use(LoRARequest("a", 1, str(folder), base_model_name="other"))
    with pytest.raises(TypeError, match="must be a LoRARequest, got str"):
        book.use("a")  # type: ignore[arg-type]
    without = AdapterBook(msgspec.structs.replace(engine_info, lora=None))
    with pytest.raises(ValueError, match="serves no adapters: start it with enable_lora=True"):
        without.use(LoRARequest("a", 1))


def test_adapters_share_the_models_tokenizer_unless_they_have_another(
    engine_info: EngineInfo,
    new: Callable[..., Path],
    word_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The files of the model's are read once, and not for adapters without any."""
    digested, digest = list[Path](), adapter_book.tokenizer_digest

    def noted(folder: Path) -> bytes:
        digested.append(folder)
        return digest(folder)

    monkeypatch.setattr(adapter_book, "tokenizer_digest", noted)
    book = AdapterBook(engine_info)
    requests = {
        name: LoRARequest(name, 1, str(new(name, None if name == "none" else word_tokenizer)))
        for name in ("none", "same", "other", "large")
    }
    for name, num_more in (("other", 8), ("large", 9)):
        path = Path(requests[name].lora_path) / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary |= {f"▁more{i}": len(vocabulary) + i for i in range(num_more)}
        path.write_text(json.dumps(tokenizer))
    assert not book.knows(requests["other"]) and book.knows(None)
    used = {"none": book.use(requests["none"])}
    assert digested == [Path(requests["none"].lora_path)]
    used |= {name: book.use(requests[name]) for name in ("same", "other")}
    assert digested.count(Path(engine_info.tokenizer)) == 1 and len(digested) == 4
    assert book.knows(requests["other"])
    assert used["none"] is not None and used["none"].tokenizer is None
    assert used["same"] is not None and used["same"].tokenizer is None
    assert used["other"] is not None and used["other"].tokenizer is not None
    assert used["other"].tokenizer.encode("more7") == [71]
    with pytest.raises(ValueError, match="has 73 tokens, the model 64, and an adapter may add 8"):
        book.use(requests["large"])


def test_few_tokenizers_are_kept_in_memory(
    engine_info: EngineInfo, new: Callable[..., Path], word_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.frontend.requests.adapter_book.MAX_TOKENIZERS", 2)
    book, requests = AdapterBook(engine_info), []
    for number in range(2):
        folder = new(f"adapter {number}", word_tokenizer)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"][f"▁own{number}"] = engine_info.vocab_size
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        requests.append(LoRARequest(folder.name, 1 + number, str(folder)))
    for _ in range(2):
        for number, request in enumerate(requests):
            used = book.use(request)
            assert used is not None and used.tokenizer is not None
            assert used.tokenizer.encode(f"own{number}") == [engine_info.vocab_size]
            assert [book.knows(each) for each in requests] == [each is request for each in requests]
    assert book.use(LoRARequest("plain", 3, str(new("plain")))).tokenizer is None  # type: ignore[union-attr]


def test_one_adapter_for_all_prompts_or_one_for_each() -> None:
    a, b = LoRARequest("a", 1), LoRARequest("b", 2)
    assert (
        for_each(None, 2) == [None, None] and for_each(a, 2) == [a, a] and for_each([a, None], 2) == [a, None]
    )
    with pytest.raises(ValueError, match="3 prompts, but 2 lora_requests"):
        for_each([a, b], 3)
    for wrong in ("a", [a, "b"], 7):
        with pytest.raises(TypeError, match="must be a LoRARequest or a list of them"):
            for_each(wrong, 2)


def test_the_core_gets_the_adapter_and_outputs_have_it(
    llm: LLM, core: FakeCore, new: Callable[..., Path]
) -> None:
    a, b = LoRARequest("a", 1, str(new("one"))), LoRARequest("b", 2)
    outputs = llm.generate(["w2", "w3", "w4"], SamplingParams(max_tokens=3), lora_request=[a, None, b])
    sources = [request.adapter for request in core.expect(Submit).requests]
    assert sources[0] is not None and (sources[0].name, sources[0].path) == ("a", a.lora_path)
    assert sources[1] is None and sources[2] is not None and sources[2].path == ""
    assert [output.lora_request for output in outputs] == [a, None, b]
    assert outputs[0].outputs[0].lora_request == a
    llm.chat([{"role": "user", "content": "w5"}], lora_request=b, use_tqdm=False)
    assert submitted(core).adapter == sources[2]
    llm.llm_engine.add_request("r", "w2", SamplingParams(), lora_request=b)
    assert submitted(core).adapter == sources[2]
    with pytest.raises(ValueError, match="token id 72, outside the vocabulary of 72"):
        llm.generate([[2, 72]], lora_request=b)  # an adapter may add 8 to 64
    assert llm.get_lora_config() == core.info.lora
    limits, split = llm.get_scheduler_config(), llm.llm_engine.get_parallel_config()
    assert (limits.max_num_seqs, limits.max_model_len, split.world_size) == (16, 4096, 1)
    config = llm.get_model_config()
    assert config == llm.model_config and config.get_vocab_size() == llm.info.vocab_size
    assert (config.dtype, config.served_model_name) == (llm.info.dtype, llm.info.served_model_names[0])
    assert llm.get_decoding_config().guided_decoding_backend == "llguidance"


def test_beams_of_a_prompt_run_with_its_adapter(llm: LLM, core: FakeCore) -> None:
    b = LoRARequest("b", 2)
    core.auto = False
    seen: list[str | None] = []

    def refuse() -> None:
        request = submitted(core)
        seen.append(None if request.adapter is None else request.adapter.name)
        core.tokens(request.key, [], error="enough", error_type="ValueError", finish_reason="error")

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(RuntimeError, match="enough"):
        llm.beam_search([{"prompt": "w2"}], BeamSearchParams(beam_width=1, max_tokens=1), lora_request=b)
    thread.join()
    assert seen == ["b"]


def test_adding_and_removing(llm: LLM, core: FakeCore, new: Callable[..., Path]) -> None:
    calls: list[Any] = []
    core.calls |= {
        "register_adapter": lambda *args: calls.append(args) or True,
        "remove_lora": lambda lora_id: lora_id == 1,
        "list_loras": lambda: [1, 5],
        "pin_lora": lambda lora_id: True,
    }
    request = LoRARequest("a", 1, str(new()))
    assert llm.add_lora(request) is True
    assert calls[0][:3] == ("a", 1, request.lora_path)
    assert llm.remove_lora(1) is True and llm.remove_lora(2) is False
    assert llm.list_loras() == [1, 5] and llm.llm_engine.pin_lora(1) is True


def test_a_request_goes_on_with_the_same_content_or_not_at_all(core: FakeCore, llm: LLM) -> None:
    """On another core, which reads the files anew."""
    core.auto = False
    session, inbox = llm.session, Inbox()
    prepared = session.intake.prepare("w2", SamplingParams(), "r", lora_request=LoRARequest("b", 2))
    (state,) = session.submit([prepared], inbox)
    assert request_to_resume(state).prompt.adapter == b""
    core.tokens(state.key, [3], adapter=b"content")
    inbox.get()
    assert request_to_resume(state).prompt.adapter == b"content" and request_to_resume(
        state
    ).output_token_ids == [[3]]
    session.abort([state])
