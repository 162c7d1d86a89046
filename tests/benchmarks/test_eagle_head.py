"""A head that is trained says in training what it says in the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.benchmarks.loading import load
from tests.workers.architectures import GROUPED, VOCAB_SIZE, Architecture
from tests.workers.driver import GREEDY
from tests.workers.parity import make_prompts
from tests.workers.speculation.speculating import SpeculativeDriver, runner_with

PLACES = [1, 2, 3]
NUM_DRAFTS = 3
ROUNDING = 0.05  # of logits, where kernels multiply in bfloat16; best and second differ by 0.3 as a rule
eagle_head = load("eagle_head")


def make_head(folder: Path) -> tuple[Path, Any, Any]:
    """A tiny model, and a head for it whose every part has a share in what it drafts."""
    from transformers import AutoModelForCausalLM

    path = Architecture("llama", GROUPED | {"num_hidden_layers": 4}).write(folder / "model", seed=2)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)
    head = eagle_head.EagleHead(model, PLACES, torch.arange(0, VOCAB_SIZE, 2), folder / "head")
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.3 * parameter.shape[-1] ** -0.5
        parameter.data = (parameter.data + noise).bfloat16().float()  # as it is written
    head._head = head._head.bfloat16().float()
    return path, head, model


def logits_of(head: Any, model: Any, tokens: list[int]) -> list[Tensor]:
    """A head's logits of each depth, [T - 1 - j, D]."""
    ids = torch.tensor([tokens])
    found = model.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
    states = torch.cat([found[place] for place in PLACES], -1)
    return [logits[0] for logits in head(states, ids, NUM_DRAFTS)]


def test_a_head_drafts_in_the_engine_what_it_drafts_in_training(tmp_path: Path) -> None:
    path, head, model = make_head(tmp_path)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    head.save(tokenizer)
    runner = runner_with(path, tmp_path / "head", "eagle3", NUM_DRAFTS)
    driver = SpeculativeDriver(runner, wanted=lambda *_: NUM_DRAFTS)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE, (9, 5)))]
    driver.run(sequences, 6)
    proposals = [proposal for sequence in sequences for proposal in sequence.proposals]
    assert len({draft for proposal in proposals for draft in proposal.drafts}) > 3
    for proposal in proposals:
        with torch.no_grad():
            each = logits_of(head, model, proposal.before + proposal.drafts)
        last = len(proposal.before) - 2
        for logits, draft in zip(each, proposal.drafts, strict=True):
            drafted = logits[last][head.target_ids == draft]
            assert float(logits[last].max() - drafted) < ROUNDING, proposal


def test_all_parts_are_trained(tmp_path: Path) -> None:
    _, head, model = make_head(tmp_path)
    (prompt,) = make_prompts(VOCAB_SIZE, [20])
    each = logits_of(head, model, prompt)
    assert [len(logits) for logits in each] == [19, 18, 17]
    sum(logits.square().mean() for logits in each).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())
