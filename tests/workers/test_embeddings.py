"""Prompts of embeddings in the worker: against transformers' `inputs_embeds`, alone, in a crowd, in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import PLACEHOLDER, media_of
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolerConfig, PoolingParams
from pagewire.workers.batch.slots import history as history_of
from pagewire.workers.run.runner import Runner
from pagewire.workers.sample.sampler import SamplingSlot
from tests.workers.architectures import MODULES, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts
from tests.workers.pooled import pool, write
from tests.workers.scheduled import SETTINGS, Setting, run

LENGTHS = (23, 5, 17, 1)
FORMS = ("llama", "gpt2", "gemma3_text")
"""A stack, with learned positions, and an embedding that scales."""


@lru_cache(maxsize=2)
def reference(folder: Path) -> Any:
    """transformers' own module."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def embedded(folder: Path, prompts: Sequence[Sequence[int]], noise: float = 0.1) -> list[torch.Tensor]:
    """What no token has: the embeddings of prompts, and something added to them."""
    torch.manual_seed(3)
    with torch.inference_mode():
        rows = [reference(folder).get_input_embeddings()(torch.tensor([*prompt])) for prompt in prompts]
    return [x + noise * x.std() * torch.randn_like(x) if noise else x for x in rows]


def prompt_of(rows: torch.Tensor, token_ids: Sequence[int] = ()) -> Prompt:
    """Embeddings, then tokens."""
    data = rows.contiguous().view(torch.uint8).numpy().tobytes()
    media = media_of(Tensor(str(rows.dtype)[6:], tuple(rows.shape), data))
    return Prompt([PLACEHOLDER] * len(rows) + list(token_ids), media)


@torch.inference_mode()
def expected_tokens(
    folder: Path, rows: torch.Tensor, token_ids: Sequence[int] = (), num_tokens: int = NUM_TOKENS
) -> list[int]:
    """transformers' greedy tokens after embeddings and tokens, all of them computed anew for each token."""
    model = reference(folder)
    output: list[int] = []
    while len(output) < num_tokens:
        tail = [*token_ids, *output]
        inputs = rows.clone()  # which some models scale in place
        if tail:
            inputs = torch.cat([rows, model.get_input_embeddings()(torch.tensor(tail))])
        logits = model(inputs_embeds=inputs[None], use_cache=False).logits
        output.append(int(logits[0, -1].argmax()))
    return output


def check_parity(folder: Path, **fields: Any) -> Runner:
    """Prompts of embeddings beside ordinary ones and one with tokens behind embeddings, chunked."""
    tokens = make_prompts(VOCAB_SIZE)
    rows = embedded(folder, make_prompts(VOCAB_SIZE, LENGTHS, seed=2))
    runner, ready = load_runner(folder, **fields)
    assert ready.embedding_size == rows[0].shape[1]
    expected = [expected_tokens(folder, x) for x in rows] + [expected_tokens(folder, rows[1], tokens[1])]
    prompts = [*map(prompt_of, rows), prompt_of(rows[1], tokens[1])]
    alone = Driver(runner).generate(tokens[:2], NUM_TOKENS)
    found = Driver(runner).generate([*prompts, *tokens[:2]], NUM_TOKENS)
    assert found == expected + alone
    return runner


@pytest.mark.parametrize("name", FORMS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_parity(SERVED[name].write(tmp_path))


@pytest.mark.every_architecture
@pytest.mark.parametrize("name", sorted(SERVED.keys() - {"gemma4_text"}.union(FORMS, MODULES)))
def test_every_architecture_takes_embeddings(name: str, tmp_path: Path) -> None:
    check_parity(SERVED[name].write(tmp_path))


@pytest.mark.parametrize("name", ["gemma4_text", "diffllama"])
def test_layers_that_look_tokens_up_take_none_and_modules_neither(name: str, tmp_path: Path) -> None:
    assert load_runner(SERVED[name].write(tmp_path))[1].embedding_size == 0


@pytest.mark.every_architecture
def test_embeddings_narrower_than_hidden_states_are_those_of_a_module(tmp_path: Path) -> None:
    folder = Architecture("opt", {"word_embed_proj_dim": 32, "ffn_dim": 100}).write(tmp_path)
    assert load_runner(folder)[1].embedding_size == 0


def test_embeddings_of_tokens_are_as_good_as_tokens(llama: Path) -> None:
    """To the bit, in the model's own dtype, whatever stands beside them."""
    tokens = make_prompts(VOCAB_SIZE, LENGTHS)
    params = SamplingParams(temperature=0.0, logprobs=5)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        runner, _ = load_runner(llama, dtype=str(dtype)[6:], num_blocks=128)
        rows = [x.to(dtype) for x in embedded(llama, tokens, noise=0)]
        plain = Driver(runner).run(tokens, NUM_TOKENS, params)
        for budget in (7, 64):
            mixed = [*map(prompt_of, rows), *tokens]
            crowd = Driver(runner, budget).run(mixed, NUM_TOKENS, params)
            expected = [(s.output, s.logprobs) for s in plain]
            assert [(s.output, s.logprobs) for s in crowd] == expected * 2


def test_any_dtype_is_rounded_to_the_models(llama: Path) -> None:
    (rows,) = embedded(llama, make_prompts(VOCAB_SIZE, [9]))
    runner, _ = load_runner(llama, dtype="bfloat16")
    params = SamplingParams(temperature=0.0, logprobs=5)
    (whole,) = Driver(runner).run([prompt_of(rows)], 4, params)
    (rounded,) = Driver(runner).run([prompt_of(rows.bfloat16())], 4, params)
    assert (whole.output, whole.logprobs) == (rounded.output, rounded.logprobs)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_schedules_change_nothing(llama: Path, setting: Setting) -> None:
    """The real scheduler: chunks, cached prefixes, preemption."""
    tokens = make_prompts(VOCAB_SIZE, (23, 17))
    rows = embedded(llama, tokens)
    prompts = [prompt_of(rows[0]), tokens[0], prompt_of(rows[1], tokens[1]), tokens[1]]
    runner, _ = load_runner(llama)
    expected = Driver(runner).generate(prompts, NUM_TOKENS)
    assert expected[0] == expected_tokens(llama, rows[0])
    found, scheduler = run(runner, setting, prompts)
    assert found == expected * 2
    if setting.share_prefixes and setting.num_blocks == 64:
        assert scheduler.stats.num_prefix_hits > 0
    if setting.num_blocks < 64:
        assert scheduler.stats.num_preemptions > 0


def test_equal_contents_share_keys_and_values_and_others_do_not(llama: Path) -> None:
    (rows,) = embedded(llama, make_prompts(VOCAB_SIZE, [20]))
    setting = Setting("overlap and cache", budget=256)
    runner, _ = load_runner(llama)
    hits = []
    for second in (rows, rows + 1, rows.half(), torch.cat([rows, rows])):
        _, scheduler = run(runner, setting, [prompt_of(rows), prompt_of(second)])
        hits.append(scheduler.stats.num_prefix_hits)
    # Each prompt comes twice, and 4 of its blocks of 4 tokens can be cached, for the last token is computed.
    assert hits[0] > hits[1] == hits[2]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        *(pytest.param(name, marks=pytest.mark.every_architecture) for name in ("gpt2", "gemma3_text")),
    ],
)
def test_all_ranks_lay_embeddings_over(name: str, tmp_path: Path) -> None:
    folder = SERVED[name].write(tmp_path)
    rows = embedded(folder, make_prompts(VOCAB_SIZE, LENGTHS))
    prompts = [*map(prompt_of, rows), *make_prompts(VOCAB_SIZE, [9])]
    runner, ready = load_runner(folder)
    expected = Driver(runner).generate(prompts, NUM_TOKENS)

    def work(rank: Rank) -> tuple[list[list[int]], int]:
        part, part_ready = load_runner(folder, collective=rank)
        return Driver(part).generate(prompts, NUM_TOKENS), part_ready.embedding_size

    assert list(run_ranks(2, work)) == [(expected, ready.embedding_size)] * 2


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_models_take_plain_embeddings(quantization: str, tmp_path: Path) -> None:
    """Those of an embedding that is quantised, too."""
    fields = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 2}
    folder = Architecture("llama", fields).write(tmp_path)
    tokens = make_prompts(VOCAB_SIZE, (20, 3))
    runner, _ = load_runner(folder, quantization=quantization)
    table = runner.model.model.base.words
    with torch.inference_mode():
        rows = [table(torch.tensor(prompt)) for prompt in tokens]
    assert Driver(runner).generate([*map(prompt_of, rows)], 8) == Driver(runner).generate(tokens, 8)


def test_no_penalty_applies_to_what_is_no_token(llama: Path) -> None:
    """The placeholder is a token of the vocabulary, which the model may well choose."""
    runner, _ = load_runner(llama)
    params = SamplingParams(
        temperature=0.0,
        repetition_penalty=50.0,
        bad_words_token_ids=[[PLACEHOLDER, i] for i in range(VOCAB_SIZE)],
    )
    media = prompt_of(torch.zeros(3, 4)).places()
    tokens = np.array([0, 0, 0, 9, 8, 0, 0])
    history = runner.slots.tokens[0]
    history[:7] = tokens

    def edits(num_tokens: int, hidden: bool) -> tuple[list[int], list[int]]:
        seen = history_of(history, media if hidden else [])
        slot = SamplingSlot(params, 0, [], seen, 5, num_tokens, VOCAB_SIZE)
        assert slot.edits.counts is not None
        return sorted(slot.edits.counts.ids.tolist()), slot.edits.forbidden().tolist()

    assert edits(5, hidden=True) == ([8, 9], [])
    assert edits(5, hidden=False) == ([0, 8, 9], [])
    assert edits(6, hidden=True) == (
        [0, 8, 9],
        list(range(VOCAB_SIZE)),
    )  # a placeholder's id that was generated
    whole = SamplingSlot(params, 0, [], np.full(3, -1), 3, 3, VOCAB_SIZE)
    assert not len(whole.edits.forbidden())
    assert whole.edits.counts is not None and not len(whole.edits.counts.ids)


def test_a_penalised_prompt_of_embeddings_leaves_its_neighbours_alone(llama: Path) -> None:
    runner, _ = load_runner(llama)
    (rows,) = embedded(llama, make_prompts(VOCAB_SIZE, [9]))
    (tokens,) = make_prompts(VOCAB_SIZE, [7])
    penalised = SamplingParams(temperature=0.0, repetition_penalty=3.0, presence_penalty=0.5)
    expected = [Driver(runner).generate([p], 8, penalised)[0] for p in (tokens, prompt_of(rows))]
    assert Driver(runner).generate([tokens, prompt_of(rows)], 8, penalised) == expected
    assert expected[1] != Driver(runner).generate([prompt_of(rows)], 8)[0]


def test_embeddings_that_the_model_cannot_compute_end_their_request_alone(llama: Path) -> None:
    """The core lets none pass that is not finite; a worker that gets one all the same gives that row an error."""
    runner, _ = load_runner(llama)
    rows = embedded(llama, make_prompts(VOCAB_SIZE, [9, 9]))
    (tokens,) = make_prompts(VOCAB_SIZE, [7])
    rows[0][3, 5] = float("nan")
    bad, good, plain = Driver(runner).run([prompt_of(rows[0]), prompt_of(rows[1]), tokens], 6)
    assert bad.errors[0] == "the model returned logits that cannot be sampled: the largest is nan"
    assert bad.error_types[0] == "NotFiniteError"
    assert good.output == expected_tokens(llama, rows[1], num_tokens=6)
    assert plain.output == Driver(runner).generate([tokens], 6)[0]


@pytest.mark.parametrize("model_type", ["llama", "bert", "modernbert", "deberta-v2"])
def test_models_that_pool_take_embeddings_where_they_look_tokens_up_once(
    model_type: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, model_type)
    mean = PoolerConfig(pooling_type="MEAN")
    runner, ready = load_runner(folder, runner="pooling", pooler_config=mean)
    if model_type == "deberta-v2":  # prompt by prompt
        assert ready.embedding_size == 0
        return
    tokens = make_prompts(128, LENGTHS)
    table = runner.model.model.base.words
    with torch.inference_mode():
        prompts = [prompt_of(table(torch.tensor(prompt)).float()) for prompt in tokens]
    task = PoolingParams(task="embed", all_tokens=True)
    assert all(map(torch.equal, pool(runner, [*prompts, *tokens], task), pool(runner, tokens, task) * 2))


@pytest.mark.parametrize("name", ["diffllama", "gemma4_text"])
def test_a_model_says_that_it_takes_none(name: str, tmp_path: Path) -> None:
    """It runs as a module of transformers, or looks tokens up once more for its layers."""
    _, ready = load_runner(SERVED[name].write(tmp_path))
    assert ready.embedding_size == 0
