"""Steps: slots, relay, chunks, prompt log probabilities, errors; and what a worker does on call."""

from __future__ import annotations

import gc
import inspect
import json
import weakref
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.ipc.wire.calls import CALLS
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.thinking import ThinkingMarks
from pagewire.ipc.wire.worker_messages import Row, SlotInit, StepPlan
from pagewire.workers.batch.flat_batch import build_batch
from pagewire.workers.batch.slots import Slots
from pagewire.workers.process.calls import METHODS, call
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.conftest import LLAMA
from tests.workers.driver import GREEDY, Driver, load_runner, tokens_of, values
from tests.workers.parity import make_prompts, transformers_tokens

MARKS = ThinkingMarks(begun=True, open_ids=[5], close_id=9)


def init(slot: int, token_ids: list[int], block_ids: list[int], params: SamplingParams = GREEDY) -> SlotInit:
    return SlotInit(slot, token_ids, len(token_ids), block_ids, params, seed=7)


def test_batch_of_mixed_rows() -> None:
    slots = Slots(max_num_seqs=3, max_model_len=16, block_size=4, vocab_size=100)
    inits = [init(2, [10, 11, 12, 13, 14], [7]), init(0, [20, 21], [3])]
    rows = [Row(2, 1, 4, [5], num_samples=1), Row(0, 0, 1)]
    slots.apply(StepPlan(0, rows, inits))
    batch = build_batch(rows, slots)
    assert batch.input_ids.tolist() == [11, 12, 13, 14, 20]
    assert batch.positions.tolist() == [1, 2, 3, 4, 0]
    assert batch.attention.slot_mapping.tolist() == [29, 30, 31, 20, 12]
    assert batch.attention.query_start_loc.tolist() == [0, 4, 5]
    assert batch.attention.seq_lens.tolist() == [5, 1]
    assert batch.attention.block_table.tolist() == [[7, 5], [3, 0]]
    assert (batch.attention.max_query_len, batch.attention.max_seq_len) == (4, 5)
    assert (batch.sample_rows, batch.sample_indices.tolist()) == ([0], [3])


def test_slots_take_blocks_and_tokens_as_they_come() -> None:
    slots = Slots(max_num_seqs=2, max_model_len=16, block_size=4, vocab_size=100)
    slots.apply(StepPlan(0, [Row(1, 0, 3, [8, 9])], [init(1, [1, 2, 3], [4])]))
    slots.append(1, 50)
    slots.apply(StepPlan(1, [Row(1, 3, 1, [6])]))
    assert slots.block_table[1].tolist() == [4, 8, 9, 6]
    assert slots.tokens[1, :4].tolist() == [1, 2, 3, 50]
    slots.apply(StepPlan(2, [], [init(1, [5], [])], freed_slots=[1]))
    assert slots.num_tokens.tolist() == [0, 1]
    assert slots.sampling[1].num_tokens == 1


def test_a_plan_may_run_a_token_that_its_planner_has_not_seen(runner: Runner, llama: Path) -> None:
    """The relay: all plans are written before the first result is read."""
    [prompt] = make_prompts(VOCAB_SIZE, [6])
    plans = [StepPlan(0, [Row(3, 0, 6, num_samples=1)], [init(3, prompt, [9, 2, 5])])]
    plans += [StepPlan(i, [Row(3, 5 + i, 1, num_samples=1)]) for i in range(1, 5)]
    found = [tokens_of(runner.step(plan))[0] for plan in plans]
    assert [found] == transformers_tokens(llama, [prompt], 5)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(runner: Runner) -> None:
    params = SamplingParams(temperature=1.0, presence_penalty=0.5)
    [prompt] = make_prompts(VOCAB_SIZE, [9])
    [whole] = Driver(runner).generate([prompt], 8, params, seeds=[5])
    again = SlotInit(6, prompt + whole[:4], 9, [40, 41, 42, 43, 44], params, seed=5)
    found = tokens_of(runner.step(StepPlan(0, [Row(6, 0, 13, num_samples=1)], [again])))
    for i in range(1, 4):
        found += tokens_of(runner.step(StepPlan(i, [Row(6, 12 + i, 1, num_samples=1)])))
    assert found == whole[4:]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(temperature=1.0, logprobs=2),
        SamplingParams(
            temperature=1.0, repetition_penalty=1.5, presence_penalty=1.0, min_tokens=4, logprobs=1
        ),
        SamplingParams(temperature=1.0, thinking_token_budget=2, thinking=MARKS, logprobs=1),
    ],
    ids=["greedy", "random", "penalties", "thinking budget"],
)
@pytest.mark.parametrize("num_right", range(4))
def test_drafts_change_no_token(runner: Runner, params: SamplingParams, num_right: int) -> None:
    """The tokens, and the bits of their log probabilities, are those of one token at a time."""
    [prompt] = make_prompts(VOCAB_SIZE, [9])
    [alone] = Driver(runner).run([prompt], 6, params, seeds=[5])
    begin = SlotInit(2, prompt, 9, [20, 21, 22, 23], params, seed=5)
    drafts = alone.output[1 : 1 + num_right]
    drafts += [(token_id + 1) % VOCAB_SIZE for token_id in alone.output[len(drafts) + 1 : 4]]
    plans = [
        StepPlan(0, [Row(2, 0, 9, num_samples=1)], [begin]),
        StepPlan(1, [Row(2, 9, 4, [], drafts, 4)]),
        StepPlan(2, [Row(2, 10 + num_right, 1, num_samples=1)]),
    ]
    results = [runner.step(plan).rows[0] for plan in plans]
    assert [len(result.token_ids) for result in results] == [1, 1 + num_right, 1]
    tokens = [token_id for result in results for token_id in result.token_ids]
    assert tokens == alone.output[: len(tokens)]
    for result, first in zip(results, (0, 1, 2 + num_right), strict=True):
        assert result.logprobs is not None
        for i in range(len(result.token_ids)):
            ids, logprobs, ranks = values(result.logprobs)
            k = len(ids) // len(ranks)
            here = slice(k * i, k * i + k)
            assert (ids[here], logprobs[here], ranks[i : i + 1]) == alone.logprobs[first + i]


def test_a_spent_budget_ends_the_reasoning(runner: Runner) -> None:
    """Whatever else forbids the closing mark."""
    params = SamplingParams(
        temperature=1.0, thinking_token_budget=2, thinking=MARKS, allowed_token_ids=[20, 21], min_tokens=5
    )
    for budget in (0, 2, 9):
        params = msgspec.structs.replace(params, thinking_token_budget=budget)
        output = Driver(runner).generate(make_prompts(VOCAB_SIZE, [9]), 6, params, seeds=[5])[0]
        assert [i for i, token_id in enumerate(output) if token_id == MARKS.close_id] == [budget][
            : budget < 6
        ]
        assert set(output) - {MARKS.close_id} <= {20, 21}


def test_prompts_may_share_blocks_that_this_step_fills(runner: Runner, llama: Path) -> None:
    [prompt] = make_prompts(VOCAB_SIZE, [10])
    first, second = init(0, prompt, [1, 2, 3]), init(1, prompt, [1, 2, 4])
    rows = [Row(1, 8, 2, num_samples=1), Row(0, 0, 10, num_samples=1)]
    found = tokens_of(runner.step(StepPlan(0, rows, [first, second])))
    assert [found] == [transformers_tokens(llama, [prompt], 1)[0] * 2]


@pytest.mark.parametrize("budget", [3, 64])
def test_prompt_logprobs(llama: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    from pagewire.workers.run import step as module

    monkeypatch.setattr(module, "LOGIT_CHUNK", 4 * VOCAB_SIZE)
    runner, _ = load_runner(llama)
    prompts = make_prompts(VOCAB_SIZE, [11, 4])
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    requests = Driver(runner, budget).run(prompts, 2, params)
    causal = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for prompt, request in zip(prompts, requests, strict=True):
        with torch.inference_mode():
            wanted = causal(torch.tensor([prompt])).logits[0].log_softmax(-1)
        rows = [values(part) for part in request.prompt_logprobs]
        ids = np.concatenate([np.reshape(r[0], (-1, 3)) for r in rows])
        found = np.concatenate([np.reshape(r[1], (-1, 3)) for r in rows])
        assert ids[:, 0].tolist() == prompt[1:]
        assert ids[:, 1:].tolist() == wanted[:-1].topk(2).indices.tolist()
        np.testing.assert_allclose(found, wanted[:-1].gather(1, torch.tensor(ids)).numpy(), atol=1e-4)


def test_a_row_with_nan_fails_alone(llama: Path, tmp_path: Path) -> None:
    poison = 77
    weights = load_file(llama / "model.safetensors")
    weights["model.embed_tokens.weight"][poison] = torch.nan
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    runner, _ = load_runner(tmp_path)
    good = make_prompts(VOCAB_SIZE, [5, 7])
    good = [[t if t != poison else 3 for t in p] for p in good]
    bad = [4, poison, 5]
    first, ill, last = Driver(runner).run([good[0], bad, good[1]], 2)
    assert ill.errors and "sampled" in ill.errors[0]
    assert not first.errors and not last.errors
    assert [first.output, last.output] == Driver(runner).generate(good, 2)


def test_an_empty_plan_and_timing(runner: Runner) -> None:
    since = runner.device.record_event()
    step = runner.launch(StepPlan(4, []))
    result = step.finish(since)
    assert step.reached() and step.end.seconds_since(since) >= 0
    assert (result.step_id, result.rows) == (4, [])
    assert result.busy_us >= 0
    assert result.idle_us >= 0


def test_methods(runner: Runner) -> None:
    assert call(runner, "ping", [], {}) == "pong"
    assert call(runner, "memory", [], {})["kv_cache"] == 64 * runner.block_bytes
    info = call(runner, "model_info", [], {})
    assert (info["architecture"], info["num_layers"], info["forward"]) == (
        "LlamaForCausalLM",
        2,
        "Network",
    )
    with pytest.raises(ValueError, match="no method 'rm'; it has load_weights, memory, model_info, ping"):
        call(runner, "rm", [], {})


@pytest.mark.parametrize(("tags", "keeps"), [(None, False), (["weights"], False), (["kv_cache"], True)])
def test_sleep_gives_memory_back_and_wake_up_takes_it(
    runner: Runner, tags: list[str] | None, keeps: bool
) -> None:
    prompts = make_prompts(VOCAB_SIZE)
    before = Driver(runner).generate(prompts, 4)
    call(runner, "sleep", [1, tags], {})
    asleep = call(runner, "memory", [], {})
    assert asleep["kv_cache"] == 0
    assert (asleep["weights"] > 0) == keeps
    call(runner, "wake_up", [["weights"]], {})
    assert runner.memory()["weights"] > 0
    call(runner, "wake_up", [], {})
    assert Driver(runner).generate(prompts, 4) == before


def test_sleep_frees_what_was_garbage_when_the_heap_was_frozen(runner: Runner) -> None:
    """The start freezes it while a thread reads the weights."""

    class Garbage:
        pass

    held = Garbage()
    held.__dict__["itself"] = held
    ref = weakref.ref(held)
    del held
    gc.freeze()
    try:
        call(runner, "sleep", [1], {})
        assert ref() is None
    finally:
        gc.unfreeze()
        call(runner, "wake_up", [], {})


@pytest.mark.parametrize(
    ("tags", "missing"), [(["weights"], "weights are dropped"), (["kv_cache"], "KV memory is given back")]
)
def test_no_step_runs_on_what_is_not_there(runner: Runner, tags: list[str], missing: str) -> None:
    prompts = make_prompts(VOCAB_SIZE)
    before = Driver(runner).generate(prompts, 4)
    call(runner, "sleep", [1, tags], {})
    with pytest.raises(RuntimeError, match=f"{missing}.*: call wake_up first"):
        Driver(runner).generate(prompts, 1)
    call(runner, "wake_up", [["kv_cache"]], {})
    call(runner, "wake_up", [["weights"]], {})
    assert Driver(runner).generate(prompts, 4) == before


def test_sleep_levels_and_tags_are_checked(runner: Runner) -> None:
    with pytest.raises(ValueError, match="level must be 1 or 2"):
        call(runner, "sleep", [3], {})
    for method, args in (("sleep", [1, ["lunch"]]), ("wake_up", [["lunch"]])):
        with pytest.raises(ValueError, match=f"{method} knows .* not lunch"):
            call(runner, method, args, {})
    with pytest.raises(TypeError, match="sleep: level: expected `int`, got `str`"):
        call(runner, "sleep", ["1"], {})
    with pytest.raises(TypeError, match="ping: too many"):
        call(runner, "ping", [1], {})


def test_every_call_has_the_arguments_that_it_is_declared_with() -> None:
    for name, method in METHODS.items():
        assert list(inspect.signature(method).parameters)[1:] == list(CALLS[name].sent.parameters), name


def test_profile(runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    with pytest.raises(RuntimeError, match="start_profile"):
        call(runner, "stop_profile", [], {})
    call(runner, "start_profile", [], {})
    with pytest.raises(RuntimeError, match="already"):
        call(runner, "start_profile", [], {})
    Driver(runner).generate([[1, 2, 3]], 2)
    trace = json.loads(Path(call(runner, "stop_profile", [], {})).read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert names >= {"pagewire.model", "pagewire.logits", "pagewire.sample"}


def test_the_first_step_leaves_no_trace(runner: Runner) -> None:
    assert not runner.slots.sampling
    assert all(not cache.k.any() and not cache.v.any() for cache in runner.caches)
    assert LLAMA.name == "llama"
