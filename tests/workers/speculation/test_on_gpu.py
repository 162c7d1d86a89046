"""Drafters on a GPU, emulated or real, where steps are launched ahead and recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pagewire.ipc.params import SamplingParams
from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.workers.runner import Runner

from ..architectures import VOCAB_SIZE
from ..device.test_cuda import llama, load  # noqa: F401 - fixtures
from ..driver import Driver
from ..parity import make_prompts
from .speculating import SpeculativeDriver

NUM_TOKENS = 7


def test_drafts_of_a_copy_of_the_model_count(llama: Path, load: Callable[..., Runner]) -> None:  # noqa: F811
    prompts, params = make_prompts(VOCAB_SIZE, [15, 4]), SamplingParams(temperature=0.8, top_k=40)
    plain = Driver(load()).generate(prompts, NUM_TOKENS, params)
    driver = SpeculativeDriver(
        load(speculative=SpeculativeConfig("draft_model", str(llama), 3)), wanted=lambda *_: 3
    )
    sequences = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, NUM_TOKENS)
    assert [s.output[:NUM_TOKENS] for s in sequences] == plain
    assert sum(s.num_accepted for s in sequences) >= 6
