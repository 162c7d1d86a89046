"""Language models of models for pictures: stacks like any other, over ranks, in stages and with adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from pagewire.kernels.cpu.build import REFERENCE
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.estimate.figures import footprint
from pagewire.workers.run.expected_road import expected_road
from tests.workers.biting import bite
from tests.workers.driver import Driver, load_runner
from tests.workers.logprobs import (
    PERMITTED,
    difference,
    flatness,
    forward_logprobs,
    loaded_in_float32,
    our_logprobs,
)
from tests.workers.parallel.test_ranks import check_parity
from tests.workers.parallel.test_stages import check_bits
from tests.workers.parity import NUM_TOKENS, greedy_tokens, make_prompts, transformers_tokens
from tests.workers.peft_adapters import AdaptedRunner
from tests.workers.shrunk import NUM_TEXT_TOKENS, shrunk
from tests.workers.versions import skip_unless_right

NAMES = ("cohere_compass", "cosmos3_edge", "step3p7")
PROMPTS = make_prompts(NUM_TEXT_TOKENS)


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint of each."""
    from transformers import AutoModelForImageTextToText

    if request.param not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this transformers does not have {request.param}")
    skip_unless_right(request.param)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(shrunk(request.param), dtype=torch.float32)
    bite(model, 0)
    made = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(made)
    return made


def test_their_text_runs_as_a_stack(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    runner, _ = load_runner(folder)
    assert str(runner.model.road) == "stack"
    assert expected_road(runner.config) == (runner.model.road, runner.decoding.why_not)
    assert footprint(read_headers(folder), REFERENCE, "bfloat16").is_stack
    expected = transformers_tokens(folder, PROMPTS, make=AutoModelForImageTextToText)
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == expected


def test_log_probabilities_are_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = loaded_in_float32(folder, AutoModelForImageTextToText)
    texts = our_logprobs(folder, NUM_TEXT_TOKENS)
    for text in texts:
        assert difference(text.logprobs, forward_logprobs(model, text.token_ids)[:-1]) < PERMITTED
    assert flatness(model, [text.token_ids for text in texts]) == ""


def test_over_ranks_and_in_stages(folder: Path) -> None:
    whole, results = check_parity(folder, 2)
    assert [result.ready.bytes_per_block * 2 for result in results] == [whole.bytes_per_block] * 2
    assert all(result.ready.weight_bytes < 0.6 * whole.weight_bytes for result in results)
    check_bits(folder, 2)


def test_adapters(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText

    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    targets = r".*language_model.*\.(q_proj|v_proj|g_proj|o_proj|fc1|fc2|gate_proj|up_proj|down_proj)"
    adapted: Any = get_peft_model(base, LoraConfig(r=4, target_modules=targets)).eval()
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 5)
    adapted.save_pretrained(tmp_path)
    expected = [greedy_tokens(adapted, prompt, NUM_TOKENS) for prompt in PROMPTS]
    runner = AdaptedRunner(folder)
    runner.load_all([tmp_path])
    assert Driver(runner.runner).generate(PROMPTS, NUM_TOKENS, adapters=[1] * len(PROMPTS)) == expected
    assert Driver(runner.runner).generate(PROMPTS, NUM_TOKENS) != expected
