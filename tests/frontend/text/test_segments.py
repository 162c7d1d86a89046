"""A text that was met lately is tokenized in part, and has the same tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import tokenizers as library
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from pagewire.frontend.text import segments
from pagewire.frontend.text.segments import SegmentCache, TextCuts, cut_tokens, special_around, stands_alone
from pagewire.frontend.text.tokenizer import LONG_TEXT, FastTokenizer, load_tokenizer
from pagewire.ipc.files.hub import model_folder
from pagewire.ipc.tenants import current_tenant
from tests.frontend import trained

MARKS = ["<|user|>", "<|assistant|>", "</s>", "<|call|>", "<|", "|>"]
WORDS = [
    *("The quick", " brown", "fox", "  ", "\n", "\n\n", " ", "def f(x):\n\treturn x", "é", "e\u0301", "你好"),
    *(
        "👩‍👩‍👧‍👦",
        "▁",
        "<think>",
        "two words",
        "0",
        "123",
        "'s",
        "<",
        ">",
        "<s",
        "user|>",
        "_",
        "ﬁ",
        "\u00a0",
    ),
    *("\uff33", "\uff1c/s\uff1e"),  # marks that a normalizer makes
]


def first_space(tokenizer: library.Tokenizer) -> library.Tokenizer:
    """With the treatment of spaces of Llama 2, which adds one before the first word only."""
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def prefix_space() -> library.Tokenizer:
    """A space before each part that begins with a word, and words split by a pattern."""
    tokenizer = trained.byte_level()
    split = pre_tokenizers.Split(library.Regex(r"\p{N}{1,3}|\s+(?!\S)|\s+"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)]
    )
    return tokenizer


def stripped() -> library.Tokenizer:
    """A normalizer that takes spaces away at both ends of each part, and added tokens that do so, too."""
    tokenizer = trained.unigram()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.NFKC(), normalizers.Lowercase()]
    )
    tokenizer.add_special_tokens(
        [
            AddedToken("<|call|>", rstrip=True, normalized=False, special=True),
            AddedToken("<mask>", lstrip=True, rstrip=True, normalized=False, special=True),
            AddedToken("word", single_word=True, normalized=False, special=True),
        ]
    )
    return tokenizer


def overlapping() -> library.Tokenizer:
    """Added tokens that overlap with others, so that before some of them nothing may be cut."""
    tokenizer = trained.byte_level()
    more = ["x<|us", "<|user|>\n", "!<|call|>", "<|call|>", "\n\n"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in more])
    return tokenizer


MORE: dict[str, Callable[[], library.Tokenizer]] = {
    "first_space": lambda: first_space(trained.llama_2()),
    "prefix_space": prefix_space,
    "stripped": stripped,
    "overlapping": overlapping,
}
NAMES = sorted({**trained.FAMILIES, **MORE})


@pytest.fixture(scope="module")
def all_tokenizers() -> dict[str, FastTokenizer]:
    makers: dict[str, Any] = {**trained.FAMILIES, **MORE}
    made = {
        name: FastTokenizer(make(), dict(trained.NAMED), trained.TEMPLATE) for name, make in makers.items()
    }
    demo = load_tokenizer(model_folder("demo"))
    assert isinstance(demo, FastTokenizer)
    return made | {"demo": demo}


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of tests are short."""
    monkeypatch.setattr(segments, "MIN_SEGMENT", 24)


def cache_of(tokenizer: FastTokenizer) -> SegmentCache:
    return SegmentCache(TextCuts(tokenizer.original, " ".join(MARKS)))


def whole(tokenizer: FastTokenizer, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer.original.encode(text, add_special_tokens=special).ids
    return ids


TEXTS = st.lists(st.sampled_from(MARKS + WORDS) | st.text(max_size=6), max_size=60).map("".join)


@pytest.mark.parametrize("name", [*NAMES, "demo"])
@settings(max_examples=150, deadline=None)
@given(history=TEXTS, turns=st.lists(TEXTS, max_size=3), special=st.booleans())
def test_the_tokens_are_those_of_the_whole_text(
    name: str, all_tokenizers: dict[str, FastTokenizer], history: str, turns: list[str], special: bool
) -> None:
    tokenizer, text = all_tokenizers[name], history
    if name == "demo":
        text = text.replace("<|user|>", "<|im_start|>").replace("</s>", "<|im_end|>")
    cache = cache_of(tokenizer)
    for turn in ["", *turns, ""]:
        text += turn
        ids = cache.encode(text, lambda part: tokenizer.encode(part, False), special, None)
        assert ids is None or ids == whole(tokenizer, text, special)


@pytest.mark.parametrize("name", [*NAMES, "demo"])
def test_most_tokenizers_cut_before_their_marks(name: str, all_tokenizers: dict[str, FastTokenizer]) -> None:
    found = cut_tokens(all_tokenizers[name].original, " ".join(MARKS))
    if name == "demo":
        assert {"<|im_start|>", "<|im_end|>"} <= set(found)
    elif name == "overlapping":
        assert "<|user|>" not in found and "<|call|>" not in found and "<|assistant|>" in found
    else:
        assert {"<|user|>", "<|assistant|>", "</s>"} <= set(found)
        assert not {"<mask>", "word"} & set(found)


class CountingParts:
    """Tokenizes, and counts the characters."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer, self.num_chars = tokenizer, 0

    def __call__(self, part: str) -> list[int]:
        self.num_chars += len(part)
        return self.tokenizer.encode(part, False)


def conversation(num_turns: int) -> str:
    draw = random.Random(7)
    words = ["the", "while", "x", "statement", "returns", "if", "12", "\n"]
    return "".join(
        f"<|{role}|>{' '.join(draw.choices(words, k=40))}</s>"
        for _ in range(num_turns)
        for role in ("user", "assistant")
    )


def test_only_the_end_of_a_longer_text_is_tokenized(all_tokenizers: dict[str, FastTokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    cache, parts = cache_of(tokenizer), CountingParts(tokenizer)
    history = conversation(50)
    cache.encode(history, parts, False, None)
    assert parts.num_chars == len(history)
    longer = history + conversation(1)
    before = parts.num_chars
    assert cache.encode(longer, parts, False, None) == whole(tokenizer, longer, False)
    assert parts.num_chars - before < len(conversation(1)) + 300


def test_what_one_has_sent_is_new_for_others(all_tokenizers: dict[str, FastTokenizer]) -> None:
    """Of another tenant, or with another cache salt: the time to tokenize shows nobody the prompts of others."""
    tokenizer = all_tokenizers["byte_level"]
    cache, parts = cache_of(tokenizer), CountingParts(tokenizer)
    text = conversation(20)
    for tenant, salt in (("", None), ("one", None), ("other", None), ("other", "salt"), ("other", "more")):
        before, token = parts.num_chars, current_tenant.set(tenant)
        cache.encode(text, parts, False, salt)
        current_tenant.reset(token)
        assert parts.num_chars - before == len(text), (tenant, salt)
    before = parts.num_chars
    cache.encode(text, parts, False, None)
    assert parts.num_chars - before < 300


def test_memory_is_bounded(all_tokenizers: dict[str, FastTokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "TENANT_BYTES", 20_000)
    tokenizer = all_tokenizers["byte_level"]
    cache, draw = cache_of(tokenizer), random.Random(3)
    for number in range(3 * segments.MAX_TENANTS):
        token = current_tenant.set(f"tenant{number}")
        for salt in (None, "a", "b"):
            text = "".join(f"<|user|>{draw.random()} the{number} {salt} statement</s>" for _ in range(200))
            assert cache.encode(text, CountingParts(tokenizer), False, salt) == whole(tokenizer, text, False)
        current_tenant.reset(token)
    kept = cache._tenants
    assert len(kept) == segments.MAX_TENANTS
    assert all(0 < each.num_bytes <= 20_000 for each in kept.values())


def test_tokens_that_overlap_are_not_cut_at() -> None:
    assert stands_alone("<|user|>", {"<|user|>", "<|end|>", "|>>", "<think>"})
    assert not stands_alone("<|user|>", {"<|user|>", "a<|"})  # may begin before it
    assert not stands_alone("<|user|>", {"<|user|>", "a<|user|>b"})
    assert not stands_alone("<|user|>", {"<|user|>", "<|user|>\n"})  # is longer
    assert not stands_alone("<a<", {"<a<"})  # overlaps with itself


def test_random_tokenizers_are_not_cut() -> None:
    tokenizer = trained.byte_level()
    assert cut_tokens(tokenizer, "")
    state = json.loads(tokenizer.to_str())
    state["model"]["dropout"] = 0.5
    assert cut_tokens(library.Tokenizer.from_str(json.dumps(state)), "") == []
    tokenizer.encode_special_tokens = True
    assert cut_tokens(tokenizer, "") == []


def test_tokens_around_a_text() -> None:
    def around(processor: Any) -> Any:
        return special_around(json.loads(processor.__getstate__()))

    template = processors.TemplateProcessing(
        single="[CLS] $A [SEP] [SEP]", pair="$A $B", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    assert special_around(None) == ([], [])
    assert around(template) == ([2], [3, 3])
    assert around(processors.Sequence([processors.ByteLevel(), template])) == ([2], [3, 3])
    assert around(processors.Sequence([template, template])) is None
    assert around(processors.RobertaProcessing(("</s>", 2), ("<s>", 1))) is None
    twice = processors.TemplateProcessing(single="$A $A", pair="$A $B", special_tokens=[])
    assert around(twice) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_finds_the_turns_of_a_conversation(
    name: str, all_tokenizers: dict[str, FastTokenizer]
) -> None:
    """Through the tokenizer's own method, which short texts pass by."""
    tokenizer = all_tokenizers[name]
    text = conversation(20)
    assert len(text) > LONG_TEXT
    for end in (len(text) // 2, len(text) - 100, len(text)):
        for special in (False, True):
            assert tokenizer.encode_turn(text[:end], special) == whole(tokenizer, text[:end], special)
