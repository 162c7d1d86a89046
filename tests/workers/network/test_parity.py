"""Every architecture that is served, on one tiny checkpoint of each; the others are refused.

Greedy tokens in float32 are those of transformers, however they are scheduled: by small chunks, forced preemption,
prefix cache on and off, overlap on and off. A token's log probabilities do not depend, by one bit, on what ran
beside it or how its prompt was chunked.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import Ready
from pagewire.kernels.cpu.build import REFERENCE
from pagewire.workers.checkpoint.headers import read_headers
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.figures import footprint
from pagewire.workers.run.expected_road import expected_road
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import ARCHITECTURES, SERVED, VOCAB_SIZE, Architecture
from tests.workers.driver import Driver, load_runner
from tests.workers.logprobs import (
    LENGTHS,
    PERMITTED,
    continued_by,
    difference,
    flatness,
    forward_logprobs,
    loaded_in_float32,
)
from tests.workers.parity import NUM_TOKENS, OWN_POSITIONS, make_prompts, our_tokens, transformers_tokens
from tests.workers.scheduled import BLOCK_SIZE, MAX_MODEL_LEN, SETTINGS, run

REFUSED = [a for a in ARCHITECTURES if a.refused is not None]
PROMPTS = make_prompts(VOCAB_SIZE, (23, 5, 17, 1, 30))


@dataclass
class Loaded:
    """A checkpoint in float32, and a runner of it."""

    folder: Path
    runner: Runner
    ready: Ready

    @cached_property
    def expected(self) -> list[list[int]]:
        """What transformers generates for `PROMPTS`."""
        return transformers_tokens(self.folder, PROMPTS)


@pytest.fixture(scope="module", params=SERVED.values(), ids=lambda a: a.name)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Each architecture that is served: pytest runs all tests of one before those of the next."""
    folder = request.param.write(tmp_path_factory.mktemp("served"))
    return Loaded(folder, *load_runner(folder, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE))


def test_served(loaded: Loaded) -> None:
    runner, ready = loaded.runner, loaded.ready
    assert ready.dtype == "float32"
    assert Driver(runner).generate(PROMPTS, NUM_TOKENS) == loaded.expected

    # What was expected by the header alone. In another dtype than the file's, all weights are copies.
    headers = read_headers(loaded.folder)
    sizes = footprint(headers, REFERENCE, "bfloat16")
    assert sizes.kv_token_bytes * 2 * runner.config.block_size == ready.bytes_per_block
    assert sizes.state_bytes == ready.bytes_per_state  # float32 in any case
    # The output layer of the first, not in the file, has one before it; CTRL's positions are not in the file.
    if headers.config["model_type"] not in {*OWN_POSITIONS, "modernbert-decoder", "ctrl"}:
        assert sizes.weight_bytes * 2 == pytest.approx(ready.weight_bytes, rel=0.02)
    assert sizes.is_stack == runner.model.is_stack
    # And by the module without weights.
    assert expected_road(runner.config) == (runner.model.road, runner.decoding.why_not)
    assert sizes.dimensions.vocab_size == ready.vocab_size


def test_log_probabilities_are_those_of_transformers(loaded: Loaded) -> None:
    """Of the whole vocabulary, where they are neither even nor the same after every prompt."""
    model = loaded_in_float32(loaded.folder)
    texts = continued_by(loaded.runner, loaded.ready.vocab_size, make_prompts(VOCAB_SIZE, LENGTHS))
    for text in texts:
        expected = forward_logprobs(model, text.token_ids)[:-1]
        assert difference(text.logprobs, expected) < PERMITTED
    assert flatness(model, [text.token_ids for text in texts]) == ""


def test_every_setting_gives_the_tokens_of_transformers(loaded: Loaded) -> None:
    for setting in SETTINGS:
        outputs, scheduler = run(loaded.runner, setting, PROMPTS)
        assert outputs == loaded.expected + loaded.expected, setting.name
        assert (scheduler.stats.num_preemptions > 0) == (setting.num_blocks < 64), setting.name
        assert scheduler.kv.pool.num_free == setting.num_blocks, setting.name
        num_free = [states.pool.num_free for states in scheduler.kv.groups]
        assert num_free == [n for n in [loaded.ready.num_states] if n], setting.name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neighbours_change_nothing(loaded: Loaded, dtype: str) -> None:
    runner, ready = loaded.runner, loaded.ready
    if dtype != ready.dtype:
        runner, ready = load_runner(loaded.folder, dtype=dtype)
    assert ready.dtype == dtype
    params = SamplingParams(temperature=1.0, logprobs=3)
    prompts = make_prompts(VOCAB_SIZE)
    together = Driver(runner, budget=16).run(prompts, 6, params)
    for i, prompt in enumerate(prompts):
        [alone] = Driver(runner, budget=64).run([prompt], 6, params, seeds=[i])
        assert alone.output == together[i].output
        assert alone.logprobs == together[i].logprobs


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda a: a.name)
def test_refused(architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any weight is read, as far as the model's forward does not depend on numbers."""
    folder = architecture.write(tmp_path)
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(LoadError, match=r"\w+ is not supported: ") as refusal:
        our_tokens(folder, [[1, 2, 3]])
    assert architecture.refused is not None
    assert architecture.refused in str(refusal.value)
