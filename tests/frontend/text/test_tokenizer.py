"""Tokenizers give the results of transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from pagewire.frontend.text.tokenizer import (
    LARGE_TEXT,
    FastTokenizer,
    Tokenizer,
    WrappedTokenizer,
    as_tokenizer,
    load_tokenizer,
)
from pagewire.ipc.errors import ModelNotFoundError
from tests.frontend import trained

FAMILIES = sorted(trained.FAMILIES)
WAIT_SECONDS = 20.0


@lru_cache(maxsize=32)
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_encode_and_decode_as_with_transformers(family: str, folders: dict[str, Path]) -> None:
    ours, their = load_tokenizer(folders[family]), theirs(folders[family])
    for text in [*trained.TEXT, "", " ", "  two  spaces ", "<|user|> <s>hi</s><think> é 你好 two words"]:
        for add in (True, False):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == their.encode(text, add_special_tokens=add)
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == their.decode(
                    ids, skip_special_tokens=skip
                )


@given(st.text(max_size=40), st.sampled_from(FAMILIES))
@settings(max_examples=200, deadline=None)
def test_any_text_encodes_as_with_transformers(
    folders: dict[str, Path], tokenizers: dict[str, Tokenizer], text: str, family: str
) -> None:
    assert tokenizers[family].encode(text) == theirs(folders[family]).encode(text)


@pytest.mark.parametrize("family", FAMILIES)
def test_any_tokens_decode_as_with_transformers(family: str, folders: dict[str, Path]) -> None:
    ours, their = load_tokenizer(folders[family]), theirs(folders[family])
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(ours.vocab_size) for _ in range(draw.randrange(12))]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == their.decode(ids, skip_special_tokens=skip)


def same(folder: Path) -> None:
    """Compare both tokenizers: declared properties, and texts with special tokens."""
    ours, their = load_tokenizer(folder), theirs(folder)
    assert ours.vocab_size == len(their)
    assert (ours.bos_token_id, ours.eos_token_id) == (their.bos_token_id, their.eos_token_id)
    assert ours.special_tokens == their.special_tokens_map
    assert ours.chat_template == their.chat_template
    special = {token_id for token_id, token in their.added_tokens_decoder.items() if token.special}
    assert ours.special_ids == special
    names = [token.content for token in their.added_tokens_decoder.values()]
    for text in ["The fox", " ".join(names), "".join(names), "x".join(names), " . ".join(names)]:
        ids = ours.encode(text)
        assert ids == their.encode(text)
        assert ours.decode(ids) == their.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == their.decode(ids)
        assert ours.convert_ids_to_tokens(ids) == their.convert_ids_to_tokens(ids)


FLAGS = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bos by config": {"add_bos_token": False},
    "eos by config": {"add_bos_token": True, "add_eos_token": True},
    "declared": {
        "added_tokens_decoder": {
            "400": FLAGS | {"content": "<extra>"},
            "401": FLAGS | {"content": "<plain>", "special": False, "normalized": True},
            "2": FLAGS | {"content": "</s>", "lstrip": True},
        }
    },
    "declared and named": {
        "added_tokens_decoder": {"400": FLAGS | {"content": "<end>", "special": False}},
        "eos_token": "<end>",
    },
    "named only": {"pad_token": "<pad>", "eos_token": "<|im_end|>"},
    "named as a dict": {"eos_token": FLAGS | {"__type": "AddedToken", "content": "<|end|>", "rstrip": True}},
    "more": {"additional_special_tokens": ["<a>", "<b>"], "extra": 1},
    "more, new": {"extra_special_tokens": ["<a>", "<|user|>"]},
    "more, by name": {"extra_special_tokens": {"image_token": "<image>"}},
    "of the model's own": {"boi_token": "<boi>"},
    "nothing named": {"bos_token": None, "eos_token": None, "unk_token": None},
    "split": {"split_special_tokens": True},
    "clean": {"clean_up_tokenization_spaces": True},
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("make", [trained.byte_level, trained.word_piece, trained.llama_2])
def test_configs_are_read_as_in_transformers(make: Callable[[], Any], name: str, tmp_path: Path) -> None:
    same(trained.save(make(), tmp_path, **CONFIGS[name]))


@pytest.mark.parametrize("model_type", [None, "llama", "mistral"])
@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", None])
@pytest.mark.parametrize(
    "config",
    [{}, {"legacy": True}, {"legacy": None}, {"add_prefix_space": False}, {"add_prefix_space": True}],
)
@pytest.mark.parametrize("make", [trained.llama_2, trained.byte_level])
def test_tokenizers_of_llama(
    make: Callable[[], Any], config: dict[str, Any], name: str | None, model_type: str | None, tmp_path: Path
) -> None:
    folder = trained.save(make(), tmp_path, tokenizer_class=name or "PreTrainedTokenizerFast", **config)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    same(folder)
    ours, their = load_tokenizer(folder), theirs(folder)
    for text in [*trained.TEXT[:7], "", " ", "  x", "a<s>b", " <|user|> hi <|assistant|>x"]:
        assert ours.encode(text) == their.encode(text)
        ids = their.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == their.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids[1:]) == their.decode(ids[1:], skip_special_tokens=True)


def test_older_files_beside_the_tokenizer(tmp_path: Path) -> None:
    folder = trained.save(trained.byte_level(), tmp_path, eos_token=None)
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"eos_token": FLAGS | {"content": "<eos>", "lstrip": True}, "pad_token": "<pad>"})
    )
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": 410, "<new>": 404}))
    same(folder)


def test_without_a_config(tmp_path: Path) -> None:
    trained.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("The fox", add_special_tokens=False)) == "The fox"
    assert tokenizer.eos_token_id is None and tokenizer.chat_template is None


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = trained.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    ours = load_tokenizer(trained.save(tokenizer, tmp_path))
    long = "The quick brown fox " * 5
    assert ours.decode(ours.encode(long)) == long
    assert ours.encode_batch(["The", long]) == [ours.encode("The"), ours.encode(long)]


def test_template_files_come_before_the_config(tmp_path: Path) -> None:
    folder = trained.save(trained.byte_level(), tmp_path, chat_template="config")
    assert load_tokenizer(folder).chat_template == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(folder).chat_template == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert load_tokenizer(folder).chat_template == {"default": "file", "tool_use": "tools"}
    same(folder)


def test_a_list_of_templates(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = trained.save(trained.byte_level(), tmp_path, chat_template=templates)
    assert load_tokenizer(folder).chat_template == {"default": "a", "tool_use": "b"}
    same(folder)


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "word_piece"])
def test_a_tokenizer_of_transformers_can_be_used(family: str, folders: dict[str, Path]) -> None:
    ours, wrapped = load_tokenizer(folders[family]), as_tokenizer(theirs(folders[family]))
    assert isinstance(wrapped, WrappedTokenizer)
    for name in (
        "vocab_size",
        "eos_token_id",
        "bos_token_id",
        "special_ids",
        "special_tokens",
        "chat_template",
    ):
        assert getattr(wrapped, name) == getattr(ours, name)
    for text in trained.TEXT:
        assert wrapped.encode(text) == ours.encode(text)
        assert wrapped.decode(ours.encode(text)) == ours.decode(ours.encode(text))
    assert wrapped.decoder == ours.decoder and wrapped.cleans_up == ours.cleans_up


def test_objects_that_are_tokenizers(tokenizers: dict[str, Tokenizer]) -> None:
    ours = tokenizers["byte_level"]
    assert as_tokenizer(ours) is ours
    assert isinstance(as_tokenizer(trained.byte_level()), FastTokenizer)
    with pytest.raises(TypeError, match="not a tokenizer: str"):
        as_tokenizer("gpt2")


def test_slow_mode_is_transformers(folders: dict[str, Path]) -> None:
    slow = load_tokenizer(folders["byte_level"], mode="slow")
    assert isinstance(slow, WrappedTokenizer)
    assert slow.encode("The fox") == load_tokenizer(folders["byte_level"]).encode("The fox")


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(vocab={word: i for i, word in enumerate(words)}).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, WrappedTokenizer)
    assert tokenizer.decode(tokenizer.encode("the foxes")) == "the foxes"


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no model folder"):
        load_tokenizer(tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(empty)


def test_added_tokens_are_added_once(tmp_path: Path) -> None:
    tokenizer = trained.byte_level()
    tokenizer.add_tokens([AddedToken("<once>", special=True)])
    ours = load_tokenizer(trained.save(tokenizer, tmp_path, pad_token="<once>"))
    assert ours.vocab_size == tokenizer.get_vocab_size()


def test_loading_needs_no_heavy_library(folders: dict[str, Path]) -> None:
    code = (
        "import sys\n"
        "import pagewire.frontend.text.chat_template, pagewire.frontend.requests.outputs\n"
        "from pagewire.frontend.text.tokenizer import load_tokenizer\n"
        "from pagewire.frontend.text.detokenize import text_stream\n"
        "tokenizer = load_tokenizer(sys.argv[1])\n"
        "stream = text_stream(tokenizer)\n"
        "text = ''.join(map(stream.feed, tokenizer.encode('The fox'))) + stream.tail()\n"
        "assert text == 'The fox', text\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "status = dict(line.split(':', 1) for line in open('/proc/self/status'))\n"
        "mib = int(status['VmHWM'].split()[0]) / 1024\n"
        "assert mib < 120, mib\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folders["byte_level"])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("length", "together"), [(LARGE_TEXT - 1, True), (LARGE_TEXT, False)])
def test_very_long_texts_are_tokenized_one_after_the_other(
    length: int, together: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(folders[FAMILIES[0]])
    meeting = threading.Barrier(2)
    met: list[bool] = []

    def encode_batch(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        try:
            meeting.wait(WAIT_SECONDS if together else 0.3)
        except threading.BrokenBarrierError:
            met.append(False)
        else:
            met.append(True)
        return [[len(texts[0])]]

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(tokenizer.encode, ["a" * length] * 2)) == [[length]] * 2
    assert met == [together] * 2
