"""Older versions of transformers: models that need a later one are refused by name, before a weight is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers import versions
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError
from pagewire.workers.module.configuration import load_config
from pagewire.workers.versions import GROUPED_NORM, SINCE, transformers_version
from tests.workers.architectures import SERVED, Architecture
from tests.workers.parity import our_tokens

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
RENAMED = {"recurrent_gemma"}  # older versions have it, in another form


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version before all that models need."""
    monkeypatch.setattr(versions, "transformers_version", lambda: (5, 17))


@pytest.mark.parametrize("model_type", ["lfm3", "recurrent_gemma"])
@pytest.mark.usefixtures("installed")
def test_a_model_of_a_later_version_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    text = rf"{model_type} is not supported with this version .* install transformers>=5\.23"
    with pytest.raises(LoadError, match=text):
        load_config(WorkerConfig(str(tmp_path)))


def test_the_table_is_that_of_transformers() -> None:
    """Of the lowest version as of the tested one, with which CI runs this."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = {kind for kind in SINCE if kind in CONFIG_MAPPING} - RENAMED
    assert known == {kind for kind, since in SINCE.items() if since <= transformers_version()} - RENAMED


def test_the_lowest_version_needs_every_entry() -> None:
    found = re.search(r'"transformers>=(\d+)\.(\d+)"', PYPROJECT.read_text())
    assert found is not None
    lowest = int(found[1]), int(found[2])
    assert min(*SINCE.values(), GROUPED_NORM) > lowest <= transformers_version()


@pytest.mark.parametrize(("name", "setting"), [("mamba2", "n_groups"), ("bamba", "mamba_n_groups")])
@pytest.mark.usefixtures("installed")
def test_groups_of_heads_that_share_a_norm_are_refused(
    name: str, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    folder = Architecture(name, SERVED[name].fields | {setting: 2}).write(tmp_path)
    with pytest.raises(LoadError, match=r"its 2 groups of heads .* install transformers>=5\.23"):
        our_tokens(folder, [[1, 2, 3]])
