"""Prompts to fill in the middle: each model's own form, found by the marks in its vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.text.infill import FORMS, InfillForm, infill_form
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.wire.messages import EngineInfo
from tests.frontend import trained
from tests.frontend.server.client import Client


def with_tokens(folder: Path, names: Sequence[str]) -> Tokenizer:
    backend = trained.byte_level()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(trained.NAMED))
    return load_tokenizer(folder)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.marks[0])
def test_a_form_is_known_by_its_marks(form: InfillForm, tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, [*form.marks, *form.ends[:1]])
    assert infill_form(tokenizer) == form
    prompt = form.prompt("def add(", "return a + b")
    pieces = [{0: "def add(", 1: "return a + b"}.get(part, part) for part in form.parts]  # type: ignore[call-overload]
    assert prompt == "".join(pieces)
    names = tokenizer.convert_ids_to_tokens(tokenizer.encode(prompt))
    assert [name for name in names if name in form.marks] == form.marks
    ends = tokenizer.convert_ids_to_tokens(form.end_token_ids(tokenizer))
    assert ends == [*form.marks, *form.ends[:1]]
    with pytest.raises(ValueError, match="no marks to fill in the middle"):
        infill_form(with_tokens(tmp_path, form.marks[1:]))


def test_a_completion_before_a_suffix(new_core: Any, engine_info: EngineInfo, tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, FORMS[0].marks)
    core = new_core()
    core.info = msgspec.structs.replace(
        engine_info, tokenizer=str(tmp_path), model_path=str(tmp_path), vocab_size=len(tokenizer)
    )
    core.auto = True
    engine = AsyncLLM.attach(core.address)
    try:
        client = Client(engine)
        body = {"prompt": ["a", "b"], "suffix": "c", "max_tokens": 3}
        assert len(client.post("/v1/completions", body).json["choices"]) == 2
        assert client.post("/api/generate", {"prompt": "a", "suffix": "c"}).status == 200
        prompts = [
            tokenizer.decode(request.prompt.token_ids, skip_special_tokens=False)
            for request in core.submitted.values()
        ]
        whole = "<s><|fim_prefix|>{}<|fim_suffix|>c<|fim_middle|>"
        assert prompts == [whole.format("a"), whole.format("b"), whole.format("a")]
        ends = FORMS[0].end_token_ids(tokenizer)
        assert len(ends) == 3
        assert all(request.params.stop_token_ids == ends for request in core.submitted.values())
        for more, param in (({"echo": True}, "echo"), ({"prompt": [5, 6]}, "suffix")):
            refused = client.post("/v1/completions", body | more)
            assert (refused.status, refused.error["param"]) == (400, param)
    finally:
        engine.shutdown()
