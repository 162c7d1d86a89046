"""`pagewire embed` and `pagewire rerank` on a tiny BERT in a core of its own."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pagewire import LLM
from pagewire.cli.main import main
from tests.cli.command import SMALL_KV, pagewire, start_core
from tests.frontend.word_pieces import write_tokenizer
from tests.workers.pooled import sentence_transformer, write

TEXTS = ["the cat sat on a mat", "a dog ran", "the cat sat", "the dog sat on the mat", "for a while"]
LINES = "".join(f"{text}\n" for text in TEXTS)


@pytest.fixture(scope="module")
def pooling_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = write(tmp_path_factory.mktemp("bert"), "bert")
    sentence_transformer(folder, "mean_tokens")
    write_tokenizer(folder)
    address = f"ipc://{folder}/core.sock"
    core = start_core(address, "--model", str(folder), "--no-weight-cache", "--num-threads", "1")
    yield address
    core.terminate()
    core.communicate(timeout=60)
    assert core.returncode == 0


@pytest.fixture(scope="module")
def expected(pooling_address: str) -> np.ndarray:
    """What `LLM.embed` makes of `TEXTS`, float32 [texts, size]."""
    with LLM.attach(pooling_address) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


@pytest.mark.parametrize("batch_size", ["2", "1024"])
def test_a_file_into_a_matrix(
    batch_size: str, pooling_address: str, expected: np.ndarray, tmp_path: Path
) -> None:
    source, target = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text(LINES)
    options = ["--attach", pooling_address, "-o", str(target), "--batch-size", batch_size]
    assert main(["embed", str(source), *options]) == 0
    found = np.load(target, allow_pickle=False)
    assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_standard_input_to_json_lines(pooling_address: str, expected: np.ndarray) -> None:
    done = pagewire("embed", "--attach", pooling_address, stdin=LINES)
    assert (done.returncode, done.stderr) == (0, "")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [sorted(line) for line in found] == [["embedding", "index"]] * 5
    assert [line["index"] for line in found] == [0, 1, 2, 3, 4]
    assert np.array_equal(np.array([line["embedding"] for line in found], np.float32), expected)


def test_json_lines_in_and_out(pooling_address: str, expected: np.ndarray, tmp_path: Path) -> None:
    """Texts, token ids, and objects with ids of their own."""
    source, target = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    lines = [TEXTS[0], {"id": "second", "text": TEXTS[1], "more": 1}, {"id": 3, "text": [2, 5, 6, 8, 3]}]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert main(["embed", str(source), "-o", str(target), "--attach", pooling_address]) == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line.get("id") for line in found] == [None, "second", 3]
    assert np.array_equal(np.array([line["embedding"] for line in found], np.float32), expected[:3])


def test_parameters(pooling_address: str, tmp_path: Path) -> None:
    source, target = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text("cat " * 500)
    options = ["--attach", pooling_address, "-o", str(target), "--no-normalize"]
    assert main(["embed", str(source), *options, "--truncate-prompt-tokens", "-1"]) == 0
    assert abs(np.linalg.norm(np.load(target)) - 1) > 0.01


@pytest.mark.parametrize(
    ("lines", "options", "status", "text"),
    [
        ("", "", 1, "there are no texts"),
        ("cat\n\ndog\n", "", 1, "line 2 is empty"),
        ('"cat"\n[]\n', "--json-lines", 1, "line 2 is empty"),
        ('"cat"\n{"no": 1}\n', "--json-lines", 1, "line 2: Object missing required field `text`"),
        ("[1]\n[2, 99999]\n", "--json-lines", 1, "line 2: "),
        ("cat\ndog\n" + "cat " * 500, "", 1, "line 3: This model's maximum context length is 128"),
        ("cat\n", "--dimensions 5", 1, "not trained for fewer"),
        ("cat\n", "--dimensions 0", 2, "dimensions"),
        ("cat\n", "--prompt-name q", 1, "prompt_name"),
        ("cat\n", "--model demo", 2, "--model has no effect with --attach"),
        ("cat\n", "-o /nowhere/x.npy", 2, "there is no folder /nowhere"),
        ("cat\n", "-o {source}", 2, "would overwrite the input"),
    ],
)
def test_mistakes(
    lines: str,
    options: str,
    status: int,
    text: str,
    pooling_address: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "texts.txt"
    source.write_text(lines)
    arguments = options.format(source=source).split()
    assert main(["embed", str(source), "--attach", pooling_address, *arguments]) == status
    message = capsys.readouterr().err
    assert text in message and len(message.splitlines()) == 1


def test_an_output_is_kept_where_there_is_no_input(
    pooling_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "vectors.npy"
    target.write_text("of another run")
    missing = str(tmp_path / "texts.txt")
    assert main(["embed", missing, "--attach", pooling_address, "-o", str(target)]) == 2
    assert f"there is no file {missing}" in capsys.readouterr().err
    assert target.read_text() == "of another run"


def test_the_batches_before_an_error_are_kept(
    pooling_address: str, expected: np.ndarray, tmp_path: Path
) -> None:
    source, target = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    source.write_text(LINES + "\n")
    options = ["--attach", pooling_address, "-o", str(target), "--batch-size", "2"]
    assert main(["embed", str(source), *options]) == 1
    assert np.array_equal(np.load(target), expected[:4])


def test_a_model_that_generates(address: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text(LINES)
    for command in (["embed"], ["rerank", "cat"]):
        assert main([*command, str(tmp_path / "texts.txt"), "--attach", address]) == 1
        assert "demo generates text and does not pool" in capsys.readouterr().err


def test_rerank(pooling_address: str, expected: np.ndarray, tmp_path: Path) -> None:
    done = pagewire("rerank", TEXTS[0], "--attach", pooling_address, stdin=LINES)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    cosines = expected @ expected[0]
    order = [int(index) for index in np.argsort(-cosines, kind="stable")]
    assert order[0] == 0 and [int(row[1]) - 1 for row in rows] == order
    assert [row[2] for row in rows] == [TEXTS[index] for index in order]
    np.testing.assert_allclose([float(row[0]) for row in rows], cosines[order], atol=1e-5)


def test_rerank_in_json(
    pooling_address: str, expected: np.ndarray, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "documents.jsonl"
    documents = [{"id": f"d{index}", "text": text} for index, text in enumerate(TEXTS)]
    source.write_text("\n".join(map(json.dumps, documents)))
    options = ["--attach", pooling_address, "--json", "--top-n", "2"]
    assert main(["rerank", TEXTS[0], str(source), *options]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    order = np.argsort(-(expected @ expected[0]), kind="stable")[:2]
    assert [result["index"] for result in results] == [int(index) for index in order]
    assert [result["document"] for result in results] == [documents[index] for index in order]
    source.write_text("[2, 3]")
    assert main(["rerank", "cat", str(source), *options]) == 1
    assert "line 1: a document is a text" in capsys.readouterr().err
    source.write_text('"cat"')
    assert main(["rerank", "cat " * 500, str(source), *options]) == 1
    assert "the query: This model's maximum context length" in capsys.readouterr().err


def test_rerank_by_a_cross_encoder_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", "AutoModelForSequenceClassification", num_labels=1)
    write_tokenizer(folder)
    options = ["--model", str(folder), "--no-weight-cache", "--num-threads", "1", *SMALL_KV]
    done: subprocess.CompletedProcess[str] = pagewire("rerank", "the cat", "--json", *options, stdin=LINES)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in io.StringIO(done.stdout)]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3, 4]
    assert [result["document"]["text"] for result in results] == [TEXTS[r["index"]] for r in results]
