"""Log probabilities of whole vocabularies, by the worker and by the forward pass of transformers.

Greedy tokens hide much: a tiny model may repeat one token whatever its layers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagewire.ipc.wire.params import SamplingParams
from pagewire.workers.run.runner import Runner
from tests.workers.driver import Driver, Request, load_runner, values
from tests.workers.parity import NUM_TOKENS, make_prompts
from tests.workers.versions import skip_unless_right

LENGTHS = (41, 5, 23, 2)
"""Of prompts: longer than windows, and than the chunks in which the driver runs them."""
PERMITTED = 1e-3
LEAST = -20.0
"""Less likely tokens are not compared: what adds to their logits is rounded to more than `PERMITTED`."""
MIN_DISTINCT = 5
MAX_ENTROPY_SHARE = 0.98
MIN_MOVED = 0.02


@dataclass(frozen=True)
class Continued:
    """A prompt with its sampled continuation, and log probabilities [n - 1, V] of all tokens after its first."""

    token_ids: list[int]
    logprobs: Tensor


def our_logprobs(folder: Path, num_text_tokens: int) -> list[Continued]:
    """What the worker gives in float32, chunked and batched, for random prompts and what it samples behind them.

    num_text_tokens: of the vocabulary; the others stand for media.

    Raises:
        LoadError: the architecture is refused.
    """
    runner, ready = load_runner(folder, dtype="float32")
    return continued_by(
        runner, ready.vocab_size, make_prompts(num_text_tokens, LENGTHS), range(3, num_text_tokens)
    )


def continued_by(
    runner: Runner, vocab_size: int, prompts: list[list[int]], allowed: Sequence[int] | None = None
) -> list[Continued]:
    """The log probabilities of prompts and of what a runner samples behind them. allowed: tokens; None: all."""
    params = SamplingParams(
        temperature=1.0,
        logprobs=vocab_size,
        prompt_logprobs=vocab_size,
        allowed_token_ids=None if allowed is None else list(allowed),
    )
    requests = Driver(runner).run(prompts, NUM_TOKENS, params)
    return [continued(request, vocab_size) for request in requests]


def continued(request: Request, vocab_size: int) -> Continued:
    """The log probabilities of a request that has asked for those of all tokens."""
    assert not request.errors, request.errors
    rows = [*map(values, request.prompt_logprobs), *request.logprobs]
    return Continued(request.prompt + request.output, torch.cat([by_token(row, vocab_size) for row in rows]))


def by_token(rows: Any, vocab_size: int) -> Tensor:
    """Log probabilities [n, V] by token id, of `values`; in each row the first is of the token that came next."""
    ids, logprobs = torch.tensor(rows[0]), torch.tensor(rows[1])
    ids, logprobs = ids.reshape(-1, vocab_size + 1), logprobs.reshape(-1, vocab_size + 1)
    return torch.full((len(ids), vocab_size), -torch.inf).scatter(1, ids, logprobs)


def loaded_in_float32(folder: Path, make: Any = None) -> Any:
    """A model of transformers. make: the class that loads it; None: that of causal language models."""
    from transformers import AutoModelForCausalLM

    return (make or AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def forward_logprobs(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Log probabilities [n, V] by one call of a model of transformers in float32, as it is without options."""
    skip_unless_right(model.config.model_type)
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # PyTorch's, the default before 5.21, has no such limit
    logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of log probabilities of likely tokens; infinite if one is no number."""
    size = min(ours.shape[1], theirs.shape[1])
    ours, theirs = ours[:, :size], theirs[:, :size]
    likely = (theirs > LEAST) | (ours > LEAST)
    return float((ours - theirs).abs()[likely].nan_to_num(torch.inf).max())


def flatness(model: Any, texts: Sequence[Sequence[int]]) -> str:
    """Why log probabilities of a model would show little; empty if they show enough.

    They are to be far from even, of many tokens, and to depend on the order of tokens before the last.
    """
    rows = torch.cat([forward_logprobs(model, text) for text in texts])
    probabilities = rows.exp()
    entropy = float(-(probabilities * rows.clamp_min(-100)).sum(1).mean())
    if entropy > MAX_ENTROPY_SHARE * log(rows.shape[1]):
        return f"the entropy is {entropy:.2f} of {log(rows.shape[1]):.2f}"
    if (distinct := len(set(rows.argmax(1).tolist()))) < MIN_DISTINCT:
        return f"{distinct} different tokens are the likeliest"
    longest = list(max(texts, key=len))
    turned = [*longest[-2::-1], longest[-1]]
    last, other = (forward_logprobs(model, text)[-1:] for text in (longest, turned))
    moved = difference(last, other)
    return "" if moved > MIN_MOVED else f"the order of tokens moves log probabilities by {moved:.4f}"
