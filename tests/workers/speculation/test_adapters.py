"""Drafters beside LoRA adapters, which they do not have themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pagewire.ipc.speculative import Method, SpeculativeConfig
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import GREEDY, Driver
from tests.workers.parity import make_prompts
from tests.workers.peft_adapters import LIMITS, AdaptedRunner, write_adapter
from tests.workers.speculation import test_eagle3, test_mlp_speculator
from tests.workers.speculation.speculating import SpeculativeDriver

NUM_TOKENS, NUM_EXTRA = 9, 400
METHODS: tuple[Method, ...] = ("eagle3", "mlp_speculator", "draft_model")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fields = GROUPED | {"num_hidden_layers": test_eagle3.NUM_LAYERS}
    return Architecture("llama", fields).write(tmp_path_factory.mktemp("model"), seed=2)


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that brings tokens of its own."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    larger = AutoModelForCausalLM.from_pretrained(model)
    larger.resize_token_embeddings(VOCAB_SIZE + NUM_EXTRA)
    larger.save_pretrained(folder / "larger")
    whole = {"r": 2, "target_modules": "all-linear", "modules_to_save": ["embed_tokens", "lm_head"]}
    return write_adapter(folder / "larger", folder / "adapter", 3, **whole)


def adapted(model: Path, adapter: Path, speculative: SpeculativeConfig | None) -> AdaptedRunner:
    """A runner of the model that has loaded the adapter."""
    runner = AdaptedRunner(model, replace(LIMITS, extra_vocab_size=NUM_EXTRA), speculative=speculative)
    runner.load_all([adapter])
    return runner


@pytest.mark.parametrize("method", METHODS)
def test_rows_with_adapters_keep_their_tokens(
    model: Path, adapter: Path, tmp_path: Path, method: Method
) -> None:
    """Also tokens that only the adapter has, in a prompt and in outputs, beside a row without one."""
    if method == "eagle3":
        test_eagle3.write(tmp_path)
    elif method == "mlp_speculator":
        test_mlp_speculator.write(tmp_path)
    prompts = [[5, VOCAB_SIZE + 7, 6], make_prompts(VOCAB_SIZE)[0]]
    expected = Driver(adapted(model, adapter, None).runner).generate(prompts, NUM_TOKENS, adapters=[1, 0])
    assert max(expected[0]) >= VOCAB_SIZE > max(expected[1])
    folder = model if method == "draft_model" else tmp_path
    runner = adapted(model, adapter, SpeculativeConfig(method, str(folder), 3)).runner
    driver = SpeculativeDriver(runner, wanted=lambda *_: 3)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(prompts)]
    sequences[0].adapter = 1
    driver.run(sequences, NUM_TOKENS)
    assert [s.output[:NUM_TOKENS] for s in sequences] == expected
    assert all(s.proposals for s in sequences)
