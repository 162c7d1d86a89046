"""Token for token what transformers generates, for every architecture that is served; the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.kernels.cpu.packed_size import REFERENCE
from pagewire.workers.errors import LoadError
from pagewire.workers.model.checkpoint_headers import read_headers
from pagewire.workers.model.footprint import footprint

from ..architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from ..driver import Driver, load_runner
from ..parity import NUM_TOKENS, make_prompts, our_tokens, transformers_tokens

SERVED = [a for a in ARCHITECTURES if a.refused is None]
REFUSED = [a for a in ARCHITECTURES if a.refused is not None]


@pytest.mark.parametrize("architecture", SERVED, ids=lambda a: a.name)
def test_served(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE)
    runner, ready = load_runner(folder)
    assert Driver(runner).generate(prompts, NUM_TOKENS) == transformers_tokens(folder, prompts)

    # What was expected by the header alone. In another dtype than the file's, all weights are copies.
    sizes = footprint(read_headers(folder), REFERENCE, "bfloat16")
    assert sizes.kv_token_bytes * 2 * runner.config.block_size == ready.bytes_per_block
    assert sizes.weight_bytes * 2 == pytest.approx(ready.weight_bytes, rel=0.02)
    assert sizes.is_stack == runner.model.is_stack
    assert sizes.dimensions.vocab_size == ready.vocab_size


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda a: a.name)
def test_refused(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.write(tmp_path)
    with pytest.raises(LoadError, match=r"\w+ is not supported: ") as refusal:
        our_tokens(folder, [[1, 2, 3]])
    assert architecture.refused is not None
    assert architecture.refused in str(refusal.value)
