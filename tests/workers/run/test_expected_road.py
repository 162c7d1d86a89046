"""How a model should run, before any weights are read.

`tests/workers/network/test_parity.py` has all that are served.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.speculative import SpeculativeConfig
from pagewire.ipc.wire.lora import LoRAConfig
from pagewire.ipc.wire.worker_messages import Parallel, WorkerConfig
from pagewire.kernels.cpu import library
from pagewire.workers.checkpoint.source import Checkpoint
from pagewire.workers.errors import LoadError
from pagewire.workers.network.hybrids import FORMS
from pagewire.workers.network.road import Road
from pagewire.workers.run.expected_road import expected_road
from tests.workers import pooled
from tests.workers.architectures import SERVED, Architecture
from tests.workers.driver import load_runner
from tests.workers.huge import write_huge
from tests.workers.seq2seq import tiny

ONE_CALL = "steps that only decode are one compiled call"
SENTENCES = {
    "llama": f"the layers run as a stack; {ONE_CALL}",
    "roberta": "the layers run as a stack; steps that only decode are not one compiled call: the output layer is a "
    "module",
    "lfm2": "the layers run as a stack with 1 half that is a module: a Lfm2ShortConv is no mixer that the kernels "
    "have; steps that only decode are not one compiled call: layers, table and output layer are not of one kind",
    "diffllama": "the layers run as transformers' module: attention has groupnorm, k_proj, o_proj, q_proj, v_proj; "
    "so it has no adapters, no draft models, no CUDA graphs, and one device; steps that only decode are not one "
    "compiled call",
}
"""One family of each road; of LFM2, if its mixers were not known."""


@pytest.fixture(autouse=True)
def kernels() -> None:
    """Without compiled kernels no step is one compiled call."""
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")


@pytest.mark.parametrize("name", SENTENCES)
def test_what_is_said_before_is_what_the_log_says_then(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(FORMS, "Lfm2ShortConv")
    folder = SERVED[name].write(tmp_path)
    assert expected_road(WorkerConfig(str(folder))).sentence == SENTENCES[name]
    with caplog.at_level(logging.INFO, "pagewire.worker"):
        load_runner(folder)
    assert SENTENCES[name] in caplog.messages


def test_no_weights_are_read_and_none_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that no machine can load."""
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    assert expected_road(WorkerConfig(str(write_huge(tmp_path)))).sentence == SENTENCES["llama"]


@pytest.mark.parametrize(("name", "halves"), [("bert", 0), ("distilbert", 0), ("deberta-v2", None)])
def test_of_a_model_that_pools_decoding_is_not_mentioned(
    name: str, halves: int | None, tmp_path: Path
) -> None:
    folder = pooled.write(tmp_path, name)
    road, why_not = expected_road(WorkerConfig(str(folder)))
    assert (road.halves, why_not) == (halves, None)
    assert load_runner(folder)[0].model.road == road


def test_an_encoder_decoder_is_no_single_stack(tmp_path: Path) -> None:
    tiny.save(tmp_path, "bart", tiny.TEXTS["bart"])
    expected = expected_road(WorkerConfig(str(tmp_path)))
    assert expected.road == Road(None, "it is an encoder-decoder")
    runner, _ = load_runner(tmp_path)
    assert (runner.model.road, runner.decoding.why_not) == expected


@pytest.mark.parametrize("name", ["lfm2", "bert"])
def test_adapters_leave_hybrids_and_encoders_on_the_stack(name: str, tmp_path: Path) -> None:
    folder = pooled.write(tmp_path, name) if name == "bert" else SERVED[name].write(tmp_path)
    limits = LoRAConfig(max_lora_rank=8)
    expected = expected_road(WorkerConfig(str(folder), lora=limits))
    assert load_runner(folder, lora=limits)[0].model.road == expected.road == Road()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora": LoRAConfig(max_lora_rank=8)}, "enable_lora"),
        (
            {"speculative": SpeculativeConfig("draft_model", "x", 3)},
            r"speculative_config \(the methods ngram",
        ),
        ({"parallel": Parallel(0, 2)}, "tensor_parallel_size"),
        ({"parallel": Parallel(0, 2, stages=2)}, "pipeline_parallel_size"),
    ],
    ids=["adapters", "a draft model", "tensor parallel", "pipeline"],
)
def test_what_a_module_lacks_is_refused_before_and_when_it_is_loaded(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = SERVED["diffllama"].write(tmp_path)
    words = (
        f"diffllama is served without {named}.*transformers' module .attention has groupnorm.*own_models.md"
    )
    with pytest.raises(LoadError, match=words):
        expected_road(WorkerConfig(str(folder), **options))
    with pytest.raises(LoadError, match=words):
        load_runner(folder, **options)


def test_drafts_by_ngrams_need_no_stack(tmp_path: Path) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    assert not load_runner(SERVED["diffllama"].write(tmp_path), speculative=speculative)[0].model.is_stack


def test_values_of_another_size_are_not_compiled(tmp_path: Path) -> None:
    """Even where all layers have the same sizes."""
    fields = SERVED["mimo_v2_flash"].fields | {"num_hidden_layers": 1}
    folder = Architecture("mimo_v2_flash", fields).write(tmp_path)
    expected = expected_road(WorkerConfig(str(folder)))
    runner, _ = load_runner(folder)
    assert (runner.model.road, runner.decoding.why_not) == expected
    assert expected.why_not == "the layers have no compiled stack"
