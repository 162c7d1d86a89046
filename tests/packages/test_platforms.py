"""Triton's model and BentoML's service, on a real engine, with small stand-ins for the platforms' own modules."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from pagewire import RequestOutputKind
from tests.benchmarks.loading import load_file

pytestmark = pytest.mark.packages
DEPLOY = Path(__file__).parents[2] / "deploy"
FINAL = 1


class Sender:
    """What Triton gives a request: it takes the responses, and the flag that says that it was the last."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.done = threading.Event()

    def send(self, response: Any = None, flags: int = 0) -> None:
        if response is not None and response.error is not None:
            self.errors.append(response.error)
        elif response is not None:
            self.texts.append(response.output_tensors[0].as_numpy()[0].decode())
        if flags == FINAL:
            self.done.set()

    def is_cancelled(self) -> bool:
        return False


def tensor(name: str, array: Any) -> Any:
    return SimpleNamespace(name=name, as_numpy=lambda: np.asarray(array))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model, loaded as Triton loads it."""
    fake = ModuleType("triton_python_backend_utils")
    fake.__dict__.update(
        Tensor=tensor,
        TritonError=str,
        InferenceResponse=lambda output_tensors=(), error=None: SimpleNamespace(
            output_tensors=output_tensors, error=error
        ),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
        get_input_tensor_by_name=lambda request, name: request.inputs.get(name),
    )
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    module = load_file("deploy_triton_model", DEPLOY / "triton" / "pagewire" / "1" / "model.py")
    model = module.TritonPythonModel()
    options = {"model": "demo", "kv_cache_memory_bytes": 64 << 20}
    config = {"parameters": {"engine_args": {"string_value": json.dumps(options)}}}
    model.initialize({"model_config": json.dumps(config)})
    yield model
    model.finalize()


def ask(model: Any, **inputs: Any) -> Sender:
    sender = Sender()
    tensors = {name: tensor(name, [value]) for name, value in inputs.items()}
    model.execute([SimpleNamespace(inputs=tensors, get_response_sender=lambda: sender)])
    assert sender.done.wait(120)
    return sender


def test_triton(triton: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = json.dumps({"max_tokens": 12, "temperature": 0}).encode()
    kinds, generate = [], triton.engine.generate

    def noting(prompt: str, params: Any, request_id: str) -> Any:
        kinds.append(params.output_kind)
        return generate(prompt, params, request_id)

    monkeypatch.setattr(triton.engine, "generate", noting)
    whole = ask(triton, text_input=b"The", sampling_parameters=parameters)
    pieces = ask(triton, text_input=b"The", sampling_parameters=parameters, stream=True)
    # How many pieces a stream has depends on how soon each is fetched: those of a fast engine come as one.
    assert kinds == [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA]
    assert len(whole.texts) == 1 and whole.texts[0] == "".join(pieces.texts)
    wrong = ask(triton, text_input=b"The", sampling_parameters=b'{"max_tokens": -1}')
    assert wrong.texts == [] and "max_tokens" in wrong.errors[0]
    config = (DEPLOY / "triton" / "pagewire" / "config.pbtxt").read_text("utf-8")
    assert all(
        f'name: "{name}"' in config for name in ("text_input", "sampling_parameters", "stream", "text_output")
    )


def test_bentoml(monkeypatch: pytest.MonkeyPatch) -> None:
    mounted: list[Any] = []
    fake = ModuleType("bentoml")
    fake.__dict__.update(
        service=lambda **options: lambda kind: kind,
        asgi_app=lambda app, path: mounted.append(app) or (lambda kind: kind),
    )
    monkeypatch.setitem(sys.modules, "bentoml", fake)
    monkeypatch.setenv("PAGEWIRE_CPU_KVCACHE_SPACE", "1")
    module = load_file("deploy_bentoml_service", DEPLOY / "bentoml" / "service.py")
    module.Pagewire()
    body = {"model": "demo", "prompt": "The", "max_tokens": 4}
    with TestClient(mounted[0]) as client:
        answer = client.post("/v1/completions", json=body)
    module.APPLICATION.app.state.service.engine.shutdown()
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
