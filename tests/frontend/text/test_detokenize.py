"""Incremental detokenization: returned text never changes, and all of it equals that of `decode`."""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.frontend.text.detokenize import StepStream, WindowStream, text_stream
from pagewire.frontend.text.steps import DecoderStep, ReplaceText, StripText, compile_decoder, overlap
from pagewire.frontend.text.stop import Detokenizer, StopStrings, shared_stops
from pagewire.frontend.text.tokenizer import Tokenizer, as_tokenizer, clean_up
from pagewire.ipc.wire.params import SamplingParams
from tests.frontend import trained

FAMILIES = sorted(trained.FAMILIES)
EXACT = sorted(set(FAMILIES) - {"unknown_decoder"})


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> str:
    """Return the text of all tokens. After each token, the text so far must be that of `decode`."""
    stream = text_stream(tokenizer, skip)
    text = ""
    for count, token_id in enumerate(ids, 1):
        text += stream.feed(token_id)
        if isinstance(stream, StepStream):
            assert text + stream.tail() == tokenizer.decode(ids[:count], skip_special_tokens=skip)
    return text + stream.end()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", [*trained.TEXT[:7], "", " ", "\n", "  a  b  "])
def test_encoded_texts_are_streamed_as_decode_returns_them(
    family: str, text: str, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers[family]
    ids = tokenizer.encode(text)
    for skip in (True, False):
        assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", EXACT)
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_the_text_of_any_tokens_is_that_of_decode(
    family: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[family]
    assert isinstance(text_stream(tokenizer), StepStream)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    assert streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("family", EXACT)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_encoded_text_is_streamed_as_decode_returns_it(
    family: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[family]
    alphabet = st.one_of(st.characters(codec="utf-8"), st.sampled_from("é你👩‍🎉\u0301 .,'\n▁<>"))
    ids = tokenizer.encode(data.draw(st.text(alphabet, max_size=20)))
    cut = data.draw(st.integers(0, len(ids)))
    assert streamed(tokenizer, ids[cut:]) == tokenizer.decode(ids[cut:])


def test_valid_and_invalid_bytes(tokenizers: dict[str, Tokenizer]) -> None:
    """Byte tokens only: valid, broken, cut and overlong UTF-8."""
    draw = random.Random(1)
    for family in ("byte_level", "llama_2"):
        tokenizer = tokenizers[family]
        names = tokenizer.convert_ids_to_tokens(range(tokenizer.vocab_size))
        single = [i for i, name in enumerate(names) if name and (len(name) == 1 or name.startswith("<0x"))]
        for _ in range(300):
            ids = draw.choices(single, k=draw.randrange(1, 12))
            assert streamed(tokenizer, ids) == tokenizer.decode(ids)


def test_part_of_a_character_is_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    stream = text_stream(tokenizer)
    parts = [stream.feed(token_id) for token_id in tokenizer.encode("a𝄞b", add_special_tokens=False)]
    assert parts == ["a", "", "", "", "𝄞", "b"]


def test_a_run_of_bytes_is_held_back_until_it_ends(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["llama_2"]
    byte = {byte: tokenizer.original.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
    good = [byte[b] for b in "🦊".encode()]
    stream = text_stream(tokenizer)
    assert [stream.feed(i) for i in good] == [""] * 4 and stream.tail() == "🦊"
    stream.feed(byte[0xFF])
    assert stream.tail() == "\ufffd" * 5 == tokenizer.decode([*good, byte[0xFF]])


def test_tokens_without_a_name_give_no_text(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    fox = tokenizer.encode("fox", add_special_tokens=False)
    assert streamed(tokenizer, [100_000, *fox, 100_000]) == "fox"


def test_the_cost_of_a_token_does_not_depend_on_the_length_of_the_text(
    tokenizers: dict[str, Tokenizer],
) -> None:
    """Cost is the number of function calls, and the size of the stream's state."""
    for family in ("byte_level", "llama_2", "word_piece"):
        tokenizer = tokenizers[family]
        ids = tokenizer.encode(" ".join(trained.TEXT), add_special_tokens=False)
        stream = text_stream(tokenizer)
        assert isinstance(stream, StepStream)
        costs = []
        for _ in range(20):
            calls = Counter[str]()
            sys.setprofile(lambda frame, event, arg, calls=calls: calls.update([event]))
            for token_id in ids:
                stream.feed(token_id)
            sys.setprofile(None)
            kept = [v for step in stream._steps for v in vars(step).values() if isinstance(v, (str, bytes))]
            costs.append((calls["call"], calls["c_call"], sum(map(len, kept))))
        assert len(set(costs[1:])) == 1, costs


# ---------------------------------------------------------------- steps


@given(st.lists(st.text("ab .'n", max_size=4), max_size=8), st.sampled_from(["a", "ab", "aba", "aa", " n'"]))
def test_replacing_in_a_stream(pieces: list[str], pattern: str) -> None:
    step = ReplaceText(pattern, "X")
    out = "".join(itertools.chain.from_iterable(step.feed([piece]) for piece in pieces))
    assert out + "".join(step.end()) == "".join(pieces).replace(pattern, "X")


@given(st.lists(st.text("a ", max_size=3), max_size=8), st.integers(0, 3), st.integers(0, 3))
def test_stripping_a_stream(pieces: list[str], left: int, right: int) -> None:
    step = StripText(" ", left, right)
    out = "".join(itertools.chain.from_iterable(step.feed([piece]) for piece in pieces))
    text = "".join(pieces)
    text = text[min(left, len(text) - len(text.lstrip(" "))) :]
    assert out == text[: len(text) - min(right, len(text) - len(text.rstrip(" ")))]


def test_clean_up_as_steps(tokenizers: dict[str, Tokenizer]) -> None:
    text = "we 're here , are n't we ? i 'm ' sure ' . ' s 've ' 'm n ' t ' ! . do not"
    assert clean_up(text) != text
    tokenizer = tokenizers["word_piece"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@given(st.text("ab", max_size=6), st.text("ab", min_size=1, max_size=4))
def test_overlap(text: str, pattern: str) -> None:
    fitting = [n for n in range(len(pattern)) if text.endswith(pattern[:n])]
    assert overlap(text, pattern) == max(fitting)


def test_unknown_decoders_have_no_steps() -> None:
    assert compile_decoder({"type": "CTC"}) is None
    regex = {"type": "Replace", "pattern": {"Regex": "a"}, "content": "b"}
    assert compile_decoder({"type": "Sequence", "decoders": [{"type": "Fuse"}, regex]}) is None
    steps = compile_decoder({"type": "Fuse"})
    assert steps is not None and type(steps[0]) is DecoderStep


# ---------------------------------------------------------------- where only decode knows


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_decoded_tokens(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[family]
    ids = tokenizer.encode(" ".join(trained.TEXT), add_special_tokens=False)
    stream = WindowStream(tokenizer.decode)
    text = "".join(stream.feed(token_id) for token_id in ids)
    assert len(text) > 0
    assert text + stream.end() == tokenizer.decode(ids)


def test_a_wrapped_tokenizer_with_its_own_decoding(folders: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    their = AutoTokenizer.from_pretrained(folders["byte_level"])
    kind = type(their)

    class Loud(kind):  # type: ignore[misc, valid-type]
        def _decode(self, *args: object, **kwargs: object) -> str:
            return str(super()._decode(*args, **kwargs)).upper()

    their.__class__ = Loud
    tokenizer = as_tokenizer(their)
    assert isinstance(text_stream(tokenizer), WindowStream)
    ids = tokenizer.encode(trained.TEXT[0])
    assert streamed(tokenizer, ids) == trained.TEXT[0].upper()


# ---------------------------------------------------------------- stop strings


def run(
    tokenizer: Tokenizer, ids: list[int], chunks: list[int], params: SamplingParams
) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string, with tokens in chunks of these sizes, read after each."""
    detokenizer = Detokenizer(tokenizer, params)
    text, used, at = "", 0, 0
    for size in itertools.cycle(chunks):
        chunk = ids[at : at + size]
        at += size
        count = detokenizer.feed(chunk)
        used += count
        text += detokenizer.read()
        if detokenizer.stop is not None or at >= len(ids):
            break
    detokenizer.end()
    return text + detokenizer.read(), used, detokenizer.stop


def expected(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> tuple[str, int, str | None]:
    """The same by its definition: decode everything after each token."""
    barrier = len(tokenizer.decode(ids[: params.min_tokens]))
    for count in range(params.min_tokens + 1, len(ids) + 1):
        text = tokenizer.decode(ids[:count])
        ends = [
            (end, end - len(stop), stop)
            for stop in params.stop_strings
            for end in range(barrier + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        if ends:
            end, begin, stop = min(ends)
            return text[: end if params.include_stop_str_in_output else begin], count, stop
    return tokenizer.decode(ids), len(ids), None


@pytest.mark.parametrize("family", ["byte_level", "llama_2", "unigram", "word_piece"])
@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_stop_strings_by_definition(
    family: str, tokenizers: dict[str, Tokenizer], data: st.DataObject
) -> None:
    tokenizer = tokenizers[family]
    if data.draw(st.booleans()):
        ids = tokenizer.encode(data.draw(st.sampled_from(trained.TEXT)), add_special_tokens=False)
    else:
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text = tokenizer.decode(ids) or "x"
    spans = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
    stops = [text[at : at + size] for at, size in data.draw(st.lists(spans, min_size=1, max_size=4))]
    params = SamplingParams(
        stop=[stop for stop in stops if "\ufffd" not in stop] or ["zzz"],
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 6)),
    )
    chunks = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    assert run(tokenizer, ids, chunks, params) == expected(tokenizer, ids, params)


@pytest.mark.parametrize(
    ("stop", "text", "expected_stop"),
    [
        ("fox", "The quick brown ", "fox"),
        (["lazy", "fox jumps"], "The quick brown ", "fox jumps"),
        (["over", "fox"], "The quick brown ", "fox"),
        (["ox", "fox"], "The quick brown ", "fox"),  # end together: the longest
        (["quick brown fox jumps", "brown"], "The quick ", "brown"),  # the string that ends first
        ("cat", "The quick brown fox jumps over the lazy dog", None),
    ],
)
def test_which_stop_string(
    stop: str | list[str], text: str, expected_stop: str | None, tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog", add_special_tokens=False)
    for size in (1, 3, 100):
        assert run(tokenizer, ids, [size], SamplingParams(stop=stop))[::2] == (text, expected_stop)
    with_stop = SamplingParams(stop=stop, include_stop_str_in_output=True)
    assert run(tokenizer, ids, [1], with_stop)[0] == text + (expected_stop or "")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_all_stop_strings_are_searched_for_at_once(data: st.DataObject) -> None:
    """Against the definition, over an alphabet of two letters in which strings contain and overlap each other."""
    strings = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6))
    text = data.draw(st.text("abc", max_size=20))
    after = data.draw(st.integers(0, 20))
    stops = StopStrings(strings)
    ends = [
        (end, -len(s), s)
        for s in strings
        for end in range(after + 1, len(text) + 1)
        if text[:end].endswith(s)
    ]
    state, end = stops.search(0, text, after)
    assert (end, stops.found[state]) == (min(ends)[::2] if ends else (None, stops.found[state]))
    if end is None:
        held = [n for s in strings for n in range(len(s)) if text.endswith(s[:n])]
        assert stops.held[state] == max(held)
        assert any(map(text.endswith, strings)) == (stops.found[state] is not None)


def test_a_search_does_the_same_work_however_many_strings_there_are() -> None:
    class CountedDict(dict[str, int]):
        lookups = 0

        def get(self, *args: Any) -> Any:
            CountedDict.lookups += 1
            return super().get(*args)

    text = "".join(random.Random(1).choices("abcdefgh", k=400))
    counts = []
    for number in (10, 2000):
        stops = StopStrings([f"{i:b}".replace("0", "a").replace("1", "b") + "#" for i in range(number)])
        stops._next = [CountedDict(following) for following in stops._next]
        CountedDict.lookups = 0
        assert stops.search(0, text, 0) == (stops.search(0, text, 0)[0], None)
        counts.append(CountedDict.lookups)
    assert 2 * len(text) <= counts[1] <= 2 * counts[0] <= 8 * len(text)


def test_text_that_may_begin_a_stop_string_is_held_back(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte_level"]
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="fox hunt"))
    feed = tokenizer.encode("The fox", add_special_tokens=False)
    detokenizer.feed(feed)
    assert detokenizer.read() == "The "
    detokenizer.feed(tokenizer.encode("es", add_special_tokens=False))
    assert detokenizer.read() == "foxes"


def test_a_stop_string_of_byte_tokens_ends_the_text_at_once(tokenizers: dict[str, Tokenizer]) -> None:
    """A newline is a byte token here, whose text is not certain before the next token."""
    tokenizer = tokenizers["llama_2"]
    ids = [tokenizer.original.token_to_id(name) for name in ("a", "<0x0A>", "b")]
    assert run(tokenizer, ids, [1], SamplingParams(stop="\n")) == ("a", 2, "\n")


def test_outputs_share_the_table_of_their_stop_strings() -> None:
    """A request may have 128 of a thousand characters, for a thousand prompts."""
    params, same = (SamplingParams(stop=["ab", "c" * 1000]) for _ in range(2))
    first = shared_stops(params)
    assert first is not None and shared_stops(same) is first
    assert shared_stops(SamplingParams(stop=["ab"])) is not first
    assert shared_stops(SamplingParams()) is None
    alive = weakref.ref(first)
    del first
    assert alive() is None
