"""One core on the demo model, in float32, for all tests that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagewire import LLM, SamplingParams
from tests.cli.command import PROMPT, start_core


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A running core's address. Its options come from a file, one of them overridden."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "engine.yaml").write_text("dtype: float32\nmax-num-seqs: 3\nkv_cache_memory_bytes: 67108864\n")
    address = f"ipc://{folder}/core.sock"
    core = start_core(address, "--config", f"{folder}/engine.yaml", "--max-num-seqs", "64")
    yield address
    core.terminate()
    core.communicate(timeout=60)
    assert core.returncode == 0


@pytest.fixture(scope="session")
def expected(address: str) -> str:
    """What `LLM` answers to `PROMPT` with `SAMPLING`."""
    with LLM.attach(address) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12)
        return llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
