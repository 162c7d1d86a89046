"""Draft models: their proposals are those of a fresh run over the same tokens, and they change no output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import PLACEHOLDER, media_of
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Row, StepPlan
from pagewire.workers.errors import LoadError
from pagewire.workers.process.calls import call
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import COMMON, GROUPED, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import GREEDY, Driver, load_runner
from tests.workers.parity import make_prompts
from tests.workers.speculation.speculating import NUM_DRAFTS, DraftOracle, SpeculativeDriver, runner_with

SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, logprobs=1)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=4)
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of other sizes than the target's, with the same vocabulary."""
    fields = GROUPED | {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2}
    return Architecture("llama", fields).write(tmp_path_factory.mktemp("small"), seed=5)


@pytest.fixture(scope="module")
def oracle(small: Path) -> DraftOracle:
    return DraftOracle(small)


@pytest.fixture(scope="module")
def plain(llama: Path) -> Runner:
    """The model without a drafter."""
    return runner_with(llama, None)


@pytest.fixture(scope="module")
def drafting(llama: Path, small: Path) -> Runner:
    """The model with the small one; every test finds what the others have left in its KV cache."""
    return runner_with(llama, small)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_all_drafts_of_a_copy_of_the_model_count(llama: Path, plain: Runner, params: SamplingParams) -> None:
    prompts = make_prompts(VOCAB_SIZE)
    expected = Driver(plain).generate(prompts, NUM_TOKENS, params)
    driver = SpeculativeDriver(runner_with(llama, llama))
    sequences = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, NUM_TOKENS)
    for sequence, output in zip(sequences, expected, strict=True):
        assert sequence.output[:NUM_TOKENS] == output
        assert [len(p.drafts) for p in sequence.proposals] == [NUM_DRAFTS] * len(sequence.proposals)
        # All but those that nothing has verified yet.
        assert sequence.num_accepted == NUM_DRAFTS * (len(sequence.proposals) - 1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_drafts_of_another_model_change_nothing(
    plain: Runner, drafting: Runner, params: SamplingParams
) -> None:
    prompts = make_prompts(VOCAB_SIZE)
    expected = Driver(plain).generate(prompts, NUM_TOKENS, params)
    driver = SpeculativeDriver(drafting)
    sequences = [driver.add(i, prompt, params, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, NUM_TOKENS)
    assert [s.output[:NUM_TOKENS] for s in sequences] == expected
    assert (
        sum(s.num_accepted for s in sequences)
        < sum(len(p.drafts) for s in sequences for p in s.proposals) / 2
    )


@pytest.mark.parametrize("budget", [7, 64])
def test_embeddings_of_which_it_sees_placeholders_change_nothing(llama: Path, budget: int) -> None:
    rows = torch.randn((20, COMMON["hidden_size"]), generator=torch.Generator().manual_seed(4))
    media = media_of(Tensor("float32", tuple(rows.shape), rows.numpy().tobytes()))
    tokens = make_prompts(VOCAB_SIZE)[0]
    prompts = [Prompt([PLACEHOLDER] * 20, media), Prompt([PLACEHOLDER] * 20 + tokens, media), Prompt(tokens)]
    plain = Driver(runner_with(llama, None)).generate(prompts, NUM_TOKENS, PENALISED)
    driver = SpeculativeDriver(runner_with(llama, llama), budget)
    sequences = [driver.add(i, prompt, PENALISED, seed=i) for i, prompt in enumerate(prompts)]
    driver.run(sequences, NUM_TOKENS)
    assert [s.output[:NUM_TOKENS] for s in sequences] == plain
    assert all(s.proposals for s in sequences) and sequences[2].num_accepted


@pytest.mark.parametrize("budget", [7, 64])
def test_proposals_are_those_of_a_fresh_run(drafting: Runner, oracle: DraftOracle, budget: int) -> None:
    """Prompts in chunks, drafts that are wrong, and steps without drafts, whose tokens it has to make up for."""
    wanted = [NUM_DRAFTS, 0, 0, 2, NUM_DRAFTS, 0]
    driver = SpeculativeDriver(drafting, budget, lambda step, slot: wanted[(step + slot) % len(wanted)])
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE))]
    driver.run(sequences, 16)
    oracle.check([proposal for s in sequences for proposal in s.proposals])


def test_a_long_prompt_is_made_up_for_over_several_steps(
    llama: Path, small: Path, oracle: DraftOracle
) -> None:
    runner = runner_with(llama, small, max_num_batched_tokens=10)
    driver = SpeculativeDriver(runner, budget=10)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE, [38, 5]))]
    driver.run(sequences, 8)
    assert len(sequences[0].output) - len(sequences[0].proposals) >= 3, "38 tokens take four steps of 10"
    oracle.check([proposal for s in sequences for proposal in s.proposals])


def test_cached_prefixes_are_shared(drafting: Runner, oracle: DraftOracle) -> None:
    """Of a sequence that runs, one that was never drafted for, and in the step that first computes them."""
    driver = SpeculativeDriver(drafting, wanted=lambda step, slot: 0 if slot == 1 else NUM_DRAFTS)
    [common, other, *tails] = make_prompts(VOCAB_SIZE, [12, 9, 3, 4, 2, 5])
    first, silent = driver.add(0, common + tails[0], GREEDY), driver.add(1, other, GREEDY)
    third = driver.add(2, common + tails[1], GREEDY)
    driver._grow(first, len(first.tokens))
    third.blocks, third.computed = first.blocks[:3], 12
    driver.run([first, silent, third], 4)
    fourth = driver.add(3, common + tails[2], GREEDY, cached=first.blocks[:3])
    fifth = driver.add(4, other[:8] + tails[3], GREEDY, cached=silent.blocks[:2])
    driver.run([fourth, fifth], 6)
    assert not silent.proposals
    oracle.check([p for s in (first, third, fourth, fifth) for p in s.proposals])


def test_preemption_and_blocks_that_are_given_out_again(
    plain: Runner, drafting: Runner, oracle: DraftOracle
) -> None:
    driver = SpeculativeDriver(drafting)
    prompts = make_prompts(VOCAB_SIZE, [14, 11, 9])
    [expected] = Driver(plain).generate(prompts[:1], 16)
    first, second = (driver.add(i, prompt, GREEDY) for i, prompt in enumerate(prompts[:2]))
    driver.run([first, second], 5)
    for sequence in (first, second):
        driver.end(sequence)
    assert driver.free[-2:] == second.blocks[1::-1], "full blocks are given out next"
    again = driver.add(1, first.tokens, GREEDY, num_prompt_tokens=len(prompts[0]))
    third = driver.add(0, prompts[2], GREEDY)
    driver.run([again, third], 16)
    assert again.output[:16] == expected
    oracle.check([p for s in (first, second, again, third) for p in s.proposals])


def test_a_sequence_that_ends_gets_no_drafts_in_anothers_slot(drafting: Runner) -> None:
    """The next plan frees its slot before its tokens are there, as on a device that runs ahead."""
    driver = SpeculativeDriver(drafting)
    sequence = driver.add(0, [5, 6, 7], GREEDY)
    driver.run([sequence], 1)
    step = drafting.launch(StepPlan(9, [Row(0, 3, 1, num_samples=1, num_drafts=3)]))
    step.sample(lambda: None)
    other = driver.add(0, [8, 9, 10], GREEDY)
    driver._grow(other, 3)
    later = drafting.launch(
        StepPlan(10, [Row(0, 0, 3, num_samples=1, num_drafts=3)], [driver._init(other)], [0])
    )
    assert step.finish().rows[0].drafts == []
    later.sample(lambda: None)
    assert len(later.finish().rows[0].drafts) == 3


def test_no_drafts_beyond_the_longest_sequence(llama: Path, small: Path, oracle: DraftOracle) -> None:
    driver = SpeculativeDriver(runner_with(llama, small, max_model_len=32))
    sequence = driver.add(0, make_prompts(VOCAB_SIZE, [20])[0], GREEDY)
    while len(sequence.tokens) < 32:
        sequence.drafts = sequence.drafts[: 31 - len(sequence.tokens)]  # as the core cuts them
        driver.step([sequence])
    assert len(sequence.tokens) == 32
    assert max(len(p.before) + len(p.drafts) for p in sequence.proposals) == 32
    oracle.check(sequence.proposals)


@pytest.mark.parametrize("tags", [None, ["kv_cache"]])
def test_sleep_includes_the_drafter(
    llama: Path, small: Path, plain: Runner, oracle: DraftOracle, tags: list[str] | None
) -> None:
    runner = runner_with(llama, small)
    full = runner.memory()
    assert runner.block_bytes > plain.block_bytes and runner.weight_bytes > plain.weight_bytes
    assert full["kv_cache"] == 64 * runner.block_bytes + runner.drafter.spare_bytes
    assert runner.ready().bytes_per_block == runner.block_bytes
    call(runner, "sleep", [1, tags], {})
    asleep = runner.memory()
    assert asleep["kv_cache"] == 0 and (asleep["weights"] == 0) == (tags is None)
    call(runner, "wake_up", [None], {})
    assert {name: runner.memory()[name] for name in ("weights", "kv_cache")} == {
        name: full[name] for name in ("weights", "kv_cache")
    }
    assert call(runner, "model_info", [], {})["drafter"] == "LlamaForCausalLM"
    driver = SpeculativeDriver(runner)
    sequence = driver.add(0, make_prompts(VOCAB_SIZE, [9])[0], GREEDY)
    driver.run([sequence], 6)
    oracle.check(sequence.proposals)


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v2"])
def test_families_of_other_structure_draft_too(llama: Path, tmp_path: Path, name: str) -> None:
    folder = SERVED[name].write(tmp_path, seed=3)
    driver = SpeculativeDriver(runner_with(llama, folder))
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE, [13, 6]))]
    driver.run(sequences, 8)
    DraftOracle(folder).check([p for s in sequences for p in s.proposals])


def test_a_draft_model_with_states_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="has layers that keep states, which drafts would change"):
        runner_with(llama, SERVED["lfm2"].write(tmp_path))


def test_a_quantised_copy_of_the_model(llama: Path) -> None:
    """Its own weight scheme: nearly all drafts count."""
    speculative = SpeculativeConfig("draft_model", str(llama), NUM_DRAFTS, quantization="int8")
    runner, _ = load_runner(llama, speculative=speculative)
    assert 0 < runner.drafter.weight_bytes < runner.model.weight_bytes
    driver = SpeculativeDriver(runner)
    sequences = [driver.add(i, prompt, GREEDY) for i, prompt in enumerate(make_prompts(VOCAB_SIZE))]
    driver.run(sequences, NUM_TOKENS)
    assert sum(s.num_accepted for s in sequences) > NUM_DRAFTS * 4
