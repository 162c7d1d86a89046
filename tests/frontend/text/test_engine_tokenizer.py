"""The tokenizer that programs get has the usual members of transformers' tokenizers, with the same results."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pagewire.demo
import pagewire.demo_vision
from pagewire.frontend.text.engine_tokenizer import EngineTokenizer, for_programs, from_programs
from pagewire.frontend.text.tokenizer import NAMED_TOKENS, as_tokenizer, load_tokenizer
from tests.frontend import trained
from tests.frontend.text.test_tokenizer import CONFIGS, theirs

TEXTS = ["The quick brown fox", "", "naïve café — 東京", "<s>hi</s> <|user|><think> unheard-of"]
DEMOS = {
    "demo": Path(pagewire.demo.__path__[0]),
    "demo_vision": Path(pagewire.demo_vision.__path__[0]),
}


def same_members(folder: Path) -> None:
    """Compare all members of both tokenizers of a folder."""
    ours, their = for_programs(load_tokenizer(folder)), theirs(folder)
    assert isinstance(ours, EngineTokenizer)
    for token in {*NAMED_TOKENS, *their.special_tokens_map}:
        assert getattr(ours, token) == getattr(their, token), token
        assert getattr(ours, f"{token}_id") == getattr(their, f"{token}_id"), token
    for name in ("all_special_tokens", "all_special_ids", "special_tokens_map", "extra_special_tokens"):
        assert getattr(ours, name) == getattr(their, name), name
    for name in ("vocab_size", "chat_template", "is_fast"):
        assert getattr(ours, name) == getattr(their, name), name
    assert (len(ours), ours.name_or_path) == (len(their), str(folder) if their.name_or_path else "")
    assert (ours.get_vocab(), ours.get_added_vocab()) == (their.get_vocab(), their.get_added_vocab())
    known = [text for text in TEXTS if text]
    assert ours(known)["input_ids"] == their(known).input_ids
    assert ours(known).attention_mask == their(known)["attention_mask"]
    for text in TEXTS:
        ids = their(text)["input_ids"]
        assert ours(text).input_ids == ids == ours.encode(text)
        assert (
            ours(text, add_special_tokens=False).input_ids == their(text, add_special_tokens=False).input_ids
        )
        tokens = their.tokenize(text)
        assert ours.tokenize(text) == tokens
        assert ours.tokenize(text, add_special_tokens=True) == their.tokenize(text, add_special_tokens=True)
        assert ours.convert_tokens_to_ids(tokens) == their.convert_tokens_to_ids(tokens)
        for skip in (False, True):
            for form in (ids, np.array(ids, int), tuple(ids)):
                assert ours.decode(form, skip_special_tokens=skip) == their.decode(
                    ids, skip_special_tokens=skip
                )
            assert ours.convert_ids_to_tokens(ids, skip) == their.convert_ids_to_tokens(ids, skip)
    batch = [their(text)["input_ids"] for text in known]
    for skip in (False, True):
        assert ours.batch_decode(batch, skip) == their.batch_decode(batch, skip)
        assert ours.decode(batch, skip) == their.decode(batch, skip)
    assert ours.batch_decode(batch[0]) == [their.decode(token) for token in batch[0]]
    assert (ours.decode(batch[0]), ours.decode([])) == (their.decode(batch[0]), their.decode([]))
    assert ours.convert_ids_to_tokens(3) == their.convert_ids_to_tokens(3)
    for token in ("fox", "not-in-any-vocabulary"):
        assert ours.convert_tokens_to_ids(token) == their.convert_tokens_to_ids(token)


@pytest.mark.parametrize("family", sorted(trained.FAMILIES))
def test_families(family: str, folders: dict[str, Path]) -> None:
    same_members(folders[family])


@pytest.mark.parametrize("name", DEMOS)
def test_demos(name: str) -> None:
    same_members(DEMOS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_configurations(name: str, tmp_path: Path) -> None:
    same_members(trained.save(trained.byte_level(), tmp_path, **CONFIGS[name]))


@pytest.fixture
def demo() -> Any:
    return for_programs(load_tokenizer(DEMOS["demo"]))


def test_what_it_does_not_have_names_the_way(demo: Any) -> None:
    way = r"transformers\.AutoTokenizer\.from_pretrained\('.*demo'\) makes a tokenizer that has "
    with pytest.raises(AttributeError, match=f"no 'save_pretrained': {way}it"):
        demo.save_pretrained("folder")
    assert not hasattr(demo, "backend_tokenizer")
    with pytest.raises(TypeError, match=f"takes no padding, return_tensors: {way}them"):
        demo(["a", "b"], padding=True, return_tensors="pt")
    with pytest.raises(AttributeError, match="input_ids and attention_mask, not 'token_type_ids'"):
        demo("a").token_type_ids  # noqa: B018


def test_a_token_that_a_program_sets_has_its_id(demo: Any) -> None:
    demo.pad_token = demo.eos_token
    assert demo.pad_token_id == demo.eos_token_id
    assert copy.copy(demo).eos_token_id == demo.eos_token_id
    demo.chat_template = "{{ messages[0]['content'] }}!"
    assert demo.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"


def test_tokenizers_go_out_and_in(demo: Any) -> None:
    assert from_programs(demo) is demo.tokenizer
    their = theirs(DEMOS["demo"])
    assert for_programs(as_tokenizer(their)) is their
    assert for_programs(None) is None
