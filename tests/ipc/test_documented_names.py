"""What the five documents of vLLM import and list: each name is there, or its import says why not and what to use.

The documents were searched for `import vllm...`, `from vllm... import ...` and the names in the headings of their
reference. "LoRAREquest" is a misprint of the fifth.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

import pagewire
from pagewire.ipc.compatibility import NAMES
from pagewire.ipc.options.engine_args import EngineArgs
from tests.test_imports import run_python

WORK = """
pagewire: AsyncEngineArgs AsyncLLMEngine BeamSearchParams ClassificationRequestOutput CompletionOutput
    EmbeddingRequestOutput EngineArgs GuidedDecodingParams LLM LLMEngine ModelRegistry PoolingParams
    PoolingRequestOutput RequestOutput SamplingParams ScoringRequestOutput
pagewire.assets.audio: AudioAsset
pagewire.assets.image: ImageAsset
pagewire.engine.arg_utils: AsyncEngineArgs EngineArgs
pagewire.inputs: ExplicitEncoderDecoderPrompt PromptInputs TextPrompt TokensPrompt zip_enc_dec_prompts
pagewire.logits_process: LogitsProcessor
pagewire.lora.request: LoRARequest
pagewire.multimodal: BatchedTensorInputs MultiModalDataBuiltins MultiModalDataDict NestedTensors
pagewire.sampling_params: BeamSearchParams GuidedDecodingParams RequestOutputKind
pagewire.utils: FlexibleArgumentParser
pagewire.v1.engine.async_llm: AsyncLLM
"""
REFUSED = """
pagewire.distributed.device_communicators.pynccl: PyNcclCommunicator
pagewire.inputs: INPUT_REGISTRY LLMInputs
pagewire.inputs.registry: DummyDataFactory InputContext InputProcessor InputRegistry
pagewire.model_executor.model_loader.tensorizer: TensorizerArgs TensorizerConfig tensorize_vllm_model
pagewire.model_executor.models.interfaces: SupportsMultiModal
pagewire.multimodal: MULTIMODAL_REGISTRY MultiModalInputs MultiModalPlugin MultiModalRegistry
pagewire.multimodal.image: ImagePlugin
"""


def pairs(text: str) -> list[tuple[str, str]]:
    """The modules and names of a table."""
    rows = (row.split(": ") for row in text.replace("\n    ", " ").strip().splitlines())
    return [(module, name) for module, names in rows for name in names.split()]


@pytest.mark.parametrize(("module", "name"), pairs(WORK))
def test_a_documented_name_is_there(module: str, name: str) -> None:
    scope: dict[str, object] = {}
    exec(f"from {module} import {name}\nimport {module}", scope)
    assert scope[name] is getattr(import_module(module), name)


@pytest.mark.parametrize(("module", "name"), pairs(REFUSED))
def test_an_import_of_another_documented_name_says_what_to_use(module: str, name: str) -> None:
    with pytest.raises(ImportError, match=r"^pagewire\.\S+ is not supported: .+; .+") as caught:
        exec(f"from {module} import {name}")
    named = str(caught.value).partition(" ")[0]
    assert f"{module}.{name}".startswith(named) and NAMES[named].instead in str(caught.value)


MODULE = "pagewire.inputs.registry"


def test_every_way_to_ask_for_a_name_that_is_absent() -> None:
    import pagewire.inputs as inputs

    reason = NAMES[MODULE].reason
    for code in (
        f"import {MODULE}",
        "from pagewire.inputs import registry",
        f"from {MODULE} import InputContext",
    ):
        with pytest.raises(ModuleNotFoundError, match=reason):
            exec(code)
    with pytest.raises(AttributeError, match=reason):
        inputs.registry  # noqa: B018
    assert not hasattr(inputs, "registry") and getattr(inputs, "registry", None) is None
    with pytest.raises(ModuleNotFoundError, match=reason):
        importlib.util.find_spec(MODULE)


def test_names_that_nobody_knows_are_pythons_own_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'pagewire\.nothing'$"):
        exec("import pagewire.nothing")
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing' from 'pagewire' "):
        exec("from pagewire import nothing")
    with pytest.raises(AttributeError, match=r"^module 'pagewire' has no attribute 'nothing'$"):
        pagewire.nothing  # noqa: B018
    assert not hasattr(pagewire, "nothing") and importlib.util.find_spec("pagewire.nothing") is None


def test_the_types_of_media_need_no_torch(tmp_path: Path) -> None:
    code = "import sys, pagewire.multimodal, pagewire.logits_process; print('torch' in sys.modules)"
    assert run_python(code, cwd=tmp_path).split() == ["False"]


PROCESSOR = """
from pagewire.logits_process import LogitsProcessor


class CustomLogitsProcessor(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores[7] += 1000.0
        return scores
"""


def test_a_processor_as_the_documents_write_it_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_processor.py").write_text(PROCESSOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    custom = runpy.run_path(str(tmp_path / "acme_processor.py"))["CustomLogitsProcessor"]()
    with pytest.raises(ValueError, match=r"logits_processors=\['NAME=module:Class'\]"):
        pagewire.SamplingParams(logits_processors=[custom])
    args = EngineArgs("model", logits_processors=["custom=acme_processor:CustomLogitsProcessor"])
    assert args.logits_processors == ["custom=acme_processor:CustomLogitsProcessor"]
    with pytest.raises(NotImplementedError):
        sys.modules["pagewire.logits_process"].LogitsProcessor()([], [])
