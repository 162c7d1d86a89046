"""docs/own_models.md: its files run here as they stand there, in the worker and in a whole engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from pagewire import ModelRegistry
from pagewire.ipc.families.media import FAMILIES
from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.models import architectures, plugins, registrations
from pagewire.ipc.models.registrations import Registrations
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.errors import LoadError
from pagewire.workers.module.attention_layer import Attention
from pagewire.workers.module.registered import take_registrations
from pagewire.workers.network.network import Network
from pagewire.workers.network.pooling_files import ENCODERS, REWARD_HEADS
from pagewire.workers.seq2seq.lengths import SOUNDS, TEXTS
from pagewire.workers.versions import SINCE
from pagewire.workers.weight_cache.key import reason_against
from tests import own_package
from tests.workers import pooled, random_adapters
from tests.workers.architectures import SERVED
from tests.workers.driver import Driver, load_runner
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import make_prompts, our_tokens, transformers_tokens
from tests.workers.peft_adapters import AdaptedRunner
from tests.workers.versions import skip_before

PROMPTS = make_prompts(own_package.VOCAB_SIZE, (23, 5, 1))
NUM_TOKENS = 6
QKV = "transformer.blocks.0.attn.qkv.weight"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with the page's package; what is registered and imported is forgotten afterwards."""
    monkeypatch.setattr(registrations, "_models", {})
    monkeypatch.setattr(registrations, "_families", {})
    monkeypatch.setattr(plugins, "_loaded", set())
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(own_package.install(folder))
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


def register() -> None:
    """What the page's plugin does."""
    from acme.plugin import register  # type: ignore[import-not-found, unused-ignore]

    register()


def test_the_module_and_the_table_of_the_page(site: Path, tmp_path: Path) -> None:
    """Whole, divided over two ranks, quantised, and as an embedder."""
    register()
    tensors = own_package.write(tmp_path / "model")
    expected = [own_package.greedy(tensors, prompt, NUM_TOKENS) for prompt in PROMPTS]
    runner, ready = load_runner(tmp_path / "model")
    assert ready.architecture == "AcmeForCausalLM"
    assert runner.model.is_stack and runner.decoding.why_not == ""
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected

    def work(rank: Rank) -> list[list[int]]:
        runner, _ = load_runner(tmp_path / "model", collective=rank)
        assert {"self_attn.q_proj", "self_attn.o_proj"} <= {
            name.partition("0.")[2].removesuffix(".weight") for name in runner.model.cuts
        }
        return Driver(runner).generate(PROMPTS, NUM_TOKENS)

    assert run_ranks(2, work) == [expected, expected]
    quantised, smaller = load_runner(tmp_path / "model", quantization="int8")
    assert len(Driver(quantised).generate(PROMPTS, 1)) == len(PROMPTS)
    assert smaller.weight_bytes < ready.weight_bytes / 2
    embedder, _ = load_runner(tmp_path / "model", convert="embed")
    for prompt, found in zip(
        PROMPTS, pooled.pool(embedder, PROMPTS, PoolingParams(task="embed")), strict=True
    ):
        last = own_package.states(tensors, torch.tensor(prompt))[-1]
        torch.testing.assert_close(found, torch.nn.functional.normalize(last, dim=0), atol=2e-5, rtol=2e-5)


def test_without_its_description_the_module_runs_for_text_on_one_device(site: Path, tmp_path: Path) -> None:
    """With the same tokens; what a stack alone has is refused by name, with the reason and the way out."""
    register()
    from acme.model import AcmeModel  # type: ignore[import-not-found, unused-ignore]

    del AcmeModel.pagewire_structure
    tensors = own_package.write(tmp_path / "model")
    runner, ready = load_runner(tmp_path / "model")
    why = "the base has embed_tokens, layers, norm"
    assert str(runner.model.road) == f"module: {why}" and not ready.embedding_size
    expected = [own_package.greedy(tensors, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected
    words = (
        f"acme is served without {{}}: its layers run as transformers' module .{why}.*or describe its layers"
    )
    with pytest.raises(LoadError, match=words.format("enable_lora")):
        load_runner(tmp_path / "model", lora=LoRAConfig())
    with pytest.raises(LoadError, match=words.format("tensor_parallel_size")):
        run_ranks(2, lambda rank: load_runner(tmp_path / "model", collective=rank))


def test_adapters_of_the_module_of_the_page(site: Path, tmp_path: Path) -> None:
    register()
    tensors = own_package.write(tmp_path / "model")
    size, module = own_package.HIDDEN, "model.layers.0.self_attn.q_proj"
    matrices = random_adapters.make_tensors(shapes={module: (size, size)})
    fields = random_adapters.CONFIG | {"target_modules": ["layers.0.self_attn.q_proj"], "lora_alpha": 1}
    folder = random_adapters.write(tmp_path / "adapter", fields, matrices)
    adapted = AdaptedRunner(tmp_path / "model")
    adapted.load_all([folder])
    a, b = (matrices[f"base_model.model.{module}.lora_{name}.weight"] for name in "AB")
    changed = tensors | {QKV: tensors[QKV].clone()}
    changed[QKV][:size] += b @ a / fields["r"]
    expected = [own_package.greedy(weights, PROMPTS[0], NUM_TOKENS) for weights in (tensors, changed)]
    assert Driver(adapted.runner).generate([PROMPTS[0]] * 2, NUM_TOKENS, adapters=[0, 1]) == expected
    assert expected[0] != expected[1]


def test_a_class_under_a_new_name(site: Path, tmp_path: Path) -> None:
    """It runs as the other one does, in one compiled call; without the registration it is refused."""
    folder = SERVED["llama"].write(tmp_path)
    expected = transformers_tokens(folder, PROMPTS)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {
        "architectures": ["AcmeChatForCausalLM"],
        "model_type": "acme_chat",
    }
    path.write_text(json.dumps(values))
    with pytest.raises(LoadError, match="acme_chat"):
        load_runner(folder)
    ModelRegistry.register_model("AcmeChatForCausalLM", LlamaForCausalLM)
    assert our_tokens(folder, PROMPTS) == expected
    runner, _ = load_runner(folder)
    assert isinstance(runner.model.model.base, Network)


def test_what_is_no_model_is_refused_by_name(site: Path, tmp_path: Path) -> None:
    own_package.write(tmp_path / "model")
    for path, reason in {
        "acme.model:AcmeLayer": "acme.model:AcmeLayer is registered as a model, but is no PreTrainedModel",
        "transformers:PreTrainedModel": "has no config_class",
        "acme.modell:Acme": r"acme.modell:Acme is registered, but cannot be imported .*No module named",
    }.items():
        ModelRegistry.register_model("AcmeForCausalLM", path)
        with pytest.raises(LoadError, match=reason):
            load_runner(tmp_path / "model")
    ModelRegistry.register_family("acme.model:AcmeConfig")
    with pytest.raises(ValueError, match=r"acme.model:AcmeConfig is registered as a family, but is a type"):
        read_configs(tmp_path / "model")


def test_a_worker_loads_the_plugins_of_its_core(site: Path, tmp_path: Path) -> None:
    """Or says which one it lacks. Its registrations are taken afterwards, and so in place of the plugins'."""
    take_registrations(Registrations({"AcmeForCausalLM": "acme.model:AcmeModel"}, plugins=("acme",)))
    own_package.write(tmp_path)
    assert registrations.all_registrations().models == {"AcmeForCausalLM": "acme.model:AcmeModel"}
    assert read_configs(tmp_path)[0]["num_hidden_layers"] == own_package.LAYERS
    # A table that is registered is read even where the repository's code may run.
    path = tmp_path / "config.json"
    path.write_text(json.dumps(own_package.CONFIG | {"auto_map": {"AutoConfig": "x.X"}}))
    assert read_configs(tmp_path, trust_remote_code=True)[0]["num_hidden_layers"] == own_package.LAYERS
    with pytest.raises(
        LoadError, match="the plugin 'other' is not installed here; installed: acme; the core has"
    ):
        take_registrations(Registrations(plugins=("other",)))


def test_its_packed_weights_are_not_kept(site: Path, tmp_path: Path) -> None:
    """The code that makes them can change; those of other models are kept all the same."""
    own_package.write(tmp_path / "model")
    config: dict[str, Any] = {"weight_cache": True}
    assert reason_against(WorkerConfig(str(tmp_path / "model"), **config)) is None
    register()
    config["registrations"] = registrations.all_registrations()
    reason = reason_against(WorkerConfig(str(tmp_path / "model"), **config))
    assert reason is not None and "registered from code that lies elsewhere" in reason
    assert reason_against(WorkerConfig(str(SERVED["llama"].write(tmp_path)), **config)) is None


@pytest.mark.parametrize("terms", [{}, {"window": 7}, {"softcap": 2.0}, {"alibi": True}, {"scale": 0.5}])
def test_the_layer_outside_of_a_step(terms: dict[str, Any]) -> None:
    """Against a loop over queries; two heads of queries read each head of keys."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 6)
    scale, softcap = terms.get("scale", 8**-0.5), terms.get("softcap")
    found = Attention(0, **terms)(query, key, value).view(20, 4, 6)
    for head in range(4):
        for place in range(20):
            first = max(0, place + 1 - terms.get("window", 20))
            logits = key[0, head // 2, first : place + 1] @ query[0, head, place] * scale
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            if "alibi" in terms:
                logits -= 2.0 ** (-2 * (head + 1)) * torch.arange(place - first, -1, -1)
            expected = logits.softmax(0) @ value[0, head // 2, first : place + 1]
            torch.testing.assert_close(found[place, head], expected)


MINE = """
from acme.model import AcmeForCausalLM

class Negated(AcmeForCausalLM):
    def forward(self, **inputs):
        output = super().forward(**inputs)
        output.logits = -output.logits
        return output
"""
PROGRAM = """
import json, sys
from pagewire import LLM, ModelRegistry, SamplingParams

ModelRegistry.register_model("AcmeForCausalLM", "mine:Negated")
with LLM(sys.argv[1], skip_tokenizer_init=True, num_gpu_blocks_override=64, dtype="float32") as llm:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    outputs = llm.generate(json.loads(sys.argv[2]), params, use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]), {"torch", "acme"} & set(sys.modules))
"""


def test_plugins_and_programs_reach_all_processes_of_an_engine(tmp_path: Path) -> None:
    """The package is in the folder in which the program starts, whose own class is taken in place of the plugin's.

    The frontend imports nothing of it.
    """
    own_package.install(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    tensors = own_package.write(tmp_path / "model")
    arguments = [str(tmp_path / "model"), json.dumps(PROMPTS)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    tensors["head.weight"] *= -1
    expected = [own_package.greedy(tensors, prompt, NUM_TOKENS) for prompt in PROMPTS]
    assert done.stdout.strip() == f"{json.dumps(expected)} set()"


def test_the_lists_are_those_of_the_tested_models() -> None:
    skip_before(max(SINCE.values()), "it has all models of the lists")
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    )

    causal = [architecture.config() for architecture in SERVED.values()]
    encoders = [AutoConfig.for_model(name) for name in pooled.ENCODERS | pooled.MORE_ENCODERS]
    bases = {AutoModel._model_mapping[type(config)].__name__ for config in (*causal, *encoders)}
    assert bases == architectures.EMBED
    assert {AutoModelForCausalLM._model_mapping[type(c)].__name__ for c in causal} == architectures.GENERATE
    assert {config.model_type for config in encoders} == ENCODERS
    assert REWARD_HEADS.keys() == architectures.REWARD
    wide = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    multimodal = {wide[name] for name, row in FAMILIES.items() if not row.refused}
    multimodal |= {MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[name] for name in SOUNDS}
    assert multimodal == architectures.MULTIMODAL
    reads = {MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES[name] for name in TEXTS}
    assert reads == architectures.ENCODER_DECODERS
