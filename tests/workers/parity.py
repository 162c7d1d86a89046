"""Greedy tokens of a model, by the worker and by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.workers.driver import Driver, load_runner
from tests.workers.versions import skip_unless_right

PROMPT_LENGTHS = (23, 5, 17, 1)
NUM_TOKENS = 10
OWN_POSITIONS = {"data2vec-text", "roberta"}
"""Types of models whose forward counts positions from behind the padding token, where `generate` counts from 0."""


def make_prompts(vocab_size: int, lengths: Sequence[int] = PROMPT_LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def transformers_tokens(
    folder: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS, make: Any = None
) -> list[list[int]]:
    """What `generate` gives, one prompt at a time, past any end of sequence.

    make: the class that loads the model; None: that of causal language models.
    """
    from transformers import AutoModelForCausalLM

    model = (make or AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()
    return [greedy_tokens(model, prompt, num_tokens) for prompt in prompts]


def forward_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model's plain forward gives, token by token."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.inference_mode():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def greedy_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What the `generate` of transformers' model, or of PEFT's around it, gives past any end of sequence."""
    skip_unless_right(model.config.model_type)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # PyTorch's, the default before 5.21, has no such limit
    if model.config.model_type in OWN_POSITIONS:
        return forward_tokens(model, prompt, num_tokens)
    model.generation_config.eos_token_id = None
    # The module of RecurrentGemma keeps states of the prompt before, which a prompt of one token goes on from.
    use_cache = model.config.model_type != "recurrent_gemma"
    ids = torch.tensor([prompt])
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        use_cache=use_cache,
    )
    return found[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def our_tokens(folder: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """What the worker gives: chunked and batched.

    Raises:
        LoadError: the architecture is refused.
    """
    runner, _ = load_runner(folder, dtype="float32")
    return Driver(runner).generate(prompts, num_tokens)
