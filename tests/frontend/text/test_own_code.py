"""A tokenizer's own code runs where it is trusted and nothing else serves the folder, and nowhere else."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from pagewire.frontend.text.tokenizer import FastTokenizer, WrappedTokenizer, load_tokenizer

CODE = """
import json
import pathlib

from transformers import PreTrainedTokenizer

pathlib.Path(__file__).with_name("was_run").touch()


class LettersTokenizer(PreTrainedTokenizer):
    vocab_files_names = {}

    @property
    def vocab_size(self):
        return 128

    def get_vocab(self):
        return {chr(code): code for code in range(128)}

    def _tokenize(self, text, **_):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token)

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, *_, **__):
        return ()
"""


@pytest.fixture(autouse=True)
def _own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that transformers makes of a folder's code do not outlive the test."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))


def add_code(folder: Path, name: str | None = "LettersTokenizer") -> Path:
    """The folder, with a tokenizer in code and, by name, as the class of its configuration."""
    (folder / "tokenization_letters.py").write_text(CODE)
    auto_map = {"AutoTokenizer": ["tokenization_letters.LettersTokenizer", None]}
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(config | {"auto_map": auto_map} | ({"tokenizer_class": name} if name else {})))
    return folder


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "repository" in record.getMessage()]


@pytest.mark.parametrize("trust", [False, True])
def test_tokenizer_json_comes_first(
    folders: dict[str, Path], tmp_path: Path, trust: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagewire.frontend")
    folder = add_code(Path(shutil.copytree(folders["byte_level"], tmp_path / "model")))
    tokenizer = load_tokenizer(folder, trust_remote_code=trust)
    assert isinstance(tokenizer, FastTokenizer)
    assert tokenizer.encode("The fox") == load_tokenizer(folders["byte_level"]).encode("The fox")
    assert not list(tmp_path.rglob("was_run"))
    assert lines(caplog) == [
        "the tokenizer is that of tokenizer.json: the code of its repository does not run"
    ]


def test_a_class_of_transformers_comes_first(
    folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagewire.frontend")
    folder = Path(shutil.copytree(folders["byte_level"], tmp_path / "model"))
    tokenizer = load_tokenizer(add_code(folder, "GPT2Tokenizer"), "slow", trust_remote_code=True)
    assert isinstance(tokenizer, WrappedTokenizer)
    assert type(tokenizer.original).__module__.startswith("transformers.")
    assert not list(tmp_path.rglob("was_run"))
    assert lines(caplog) == ["the tokenizer is transformers' own: the code of its repository does not run"]


def test_code_runs_where_it_is_trusted_and_nothing_else_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagewire.frontend")
    (tmp_path / "model").mkdir()
    folder = add_code(tmp_path / "model")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_tokenizer(folder)
    assert not list(tmp_path.rglob("was_run"))
    caplog.clear()
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert tokenizer.encode("The fox") == [ord(letter) for letter in "The fox"]
    assert list(tmp_path.rglob("was_run"))
    [line] = lines(caplog)
    assert line.startswith("the tokenizer is made by the code of its repository (trust_remote_code)")
