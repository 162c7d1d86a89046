"""What decoders are served with, as benchmarks.matrix asks the engine for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewire.kernels.cpu import library
from tests.benchmarks.loading import load
from tests.workers.architectures import SERVED

matrix = load("matrix")
MODULE = {
    "start from packed weights": "a ModuleBase has no form in a file of packed weights",
    "compiled decoding": "the layers run as a module of transformers",
    "LoRA": "diffllama is served without enable_lora: its layers run as transformers' module",
    "EAGLE-3": "diffllama is served without speculative_config (the methods ngram and suffix work)",
    "TP 2": "diffllama is served without tensor_parallel_size",
    "PP 2": "diffllama is served without pipeline_parallel_size",
}
"""What is refused of a model whose layers run as a module, and words of the reason."""


@pytest.fixture(autouse=True)
def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulated GPU takes longer than all else; see below."""
    if library.choose() is None:
        pytest.skip("there are no compiled kernels here")
    monkeypatch.setitem(matrix.FEATURES, "CUDA graph", lambda trial: matrix.YES)


def test_each_feature_is_served_or_refused_in_the_words_of_the_engine() -> None:
    llama, diffllama = sorted(matrix.rows(["llama", "diffllama"]), reverse=True)
    assert set(llama.answers) == {"yes"}
    answers = dict(zip(matrix.FEATURES, diffllama.answers, strict=True))
    assert {name for name, answer in answers.items() if answer != "yes"} == set(MODULE)
    for name, reason in MODULE.items():
        assert answers[name].startswith("refused: ") and reason in answers[name]


def test_steps_that_wait_for_the_device_are_no_graph(tmp_path: Path) -> None:
    trial = matrix.Trial(SERVED["dbrx"], tmp_path)
    assert matrix.cuda_graph(trial).startswith("refused: the model waits for the device: aten::")


def test_a_table_is_read_as_it_was_written_and_rows_are_replaced() -> None:
    def row(name: str, last: str = "yes") -> object:
        return matrix.Row(name, ("yes",) * (len(matrix.FEATURES) - 1) + (last,))

    rows = [row("gemma"), row("llama", "refused: it is | one")]
    text = matrix.table(rows)
    assert text.startswith("**Of 2 decoders: start from packed weights 2,") and "CUDA graph 1**" in text
    (first, *_) = matrix.read(matrix.table(rows[:1]))
    assert first == rows[0]
    merged = matrix.merged(
        [row("llama", "refused: no"), row("gemma"), row("gone")], [row("llama"), row("gpt2")]
    )
    assert merged == [row("gemma"), row("gpt2"), row("llama")]


def test_a_reason_is_one_cell(tmp_path: Path) -> None:
    def ask(trial: object) -> str:
        raise matrix.LoadError("a | b\nand more")

    assert matrix.answer(matrix.Trial(SERVED["llama"], tmp_path), ask) == "refused: a / b"
