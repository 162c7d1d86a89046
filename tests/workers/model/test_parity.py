"""Token for token what transformers generates, for every architecture that is served; the others are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.workers.errors import LoadError

from ..architectures import ARCHITECTURES, VOCAB_SIZE, Architecture
from ..parity import make_prompts, our_tokens, transformers_tokens

SERVED = [a for a in ARCHITECTURES if a.refused is None]
REFUSED = [a for a in ARCHITECTURES if a.refused is not None]


@pytest.mark.parametrize("architecture", SERVED, ids=lambda a: a.name)
def test_served(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.write(tmp_path)
    prompts = make_prompts(VOCAB_SIZE)
    assert our_tokens(folder, prompts) == transformers_tokens(folder, prompts)


@pytest.mark.parametrize("architecture", REFUSED, ids=lambda a: a.name)
def test_refused(architecture: Architecture, tmp_path: Path) -> None:
    folder = architecture.write(tmp_path)
    with pytest.raises(LoadError, match=r"\w+ is not supported: ") as refusal:
        our_tokens(folder, [[1, 2, 3]])
    assert architecture.refused is not None
    assert architecture.refused in str(refusal.value)
