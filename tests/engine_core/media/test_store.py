"""The features of media: what is checked, what is kept, and what is made once."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import msgspec
import pytest

from pagewire.engine_core.media.features import Features
from pagewire.engine_core.media.jobs import Array, Described, Processed
from pagewire.engine_core.media.store import MediaLimits, MediaStore, PendingMedia
from pagewire.ipc.recent import ENTRY_BYTES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import check_encoded
from pagewire.ipc.wire.items import NOTHING, Media, Prompt
from pagewire.ipc.wire.media import MediaInfo, MediaLayout, MediumInfo, media_name, uuid_name

F = b"frontend"
PLACE, BEGIN = 9, 8
INFO = MediaInfo({"image": MediumInfo(PLACE, "<image>", PLACE, limit=2)})
BIG = 1000
KEPT = 6 * BIG + 3 * 4  # bytes of a picture's features, with its layout
LIMITS = MediaLimits(5, max_model_len=20)


class CountingProcessor:
    """A picture of n rows stands for a begin and n places; its features are its bytes. It can be made to wait."""

    def __init__(self) -> None:
        self.num_processed = self.num_laid = 0
        self.rows: list[int] = []  # of pictures that were laid out, in order
        self.laying = threading.Condition()
        self.may_lay = threading.Semaphore(1000)
        self.go = threading.Event()
        self.go.set()
        self.began = threading.Event()

    def describe(self) -> Described:
        return Described({"image": (PLACE, "<image>", PLACE)})

    def lay(self, kind: str, shape: Sequence[int], options: str) -> Processed:
        self.num_laid += 1
        with self.laying:
            self.rows.append(shape[0])
            self.laying.notify_all()
        assert self.may_lay.acquire(timeout=60)
        more = json.loads(options or "{}").get("more", 0)
        return Processed([BEGIN, *[PLACE] * shape[0], *[BEGIN] * more])

    def process(self, kind: str, content: Tensor, options: str) -> Processed:
        self.began.set()
        assert self.go.wait(60)
        self.num_processed += 1
        if not content.data[0]:
            raise ValueError("it is black")
        data = bytes(content.data) * BIG
        return Processed(
            self.lay(kind, content.shape, options).token_ids, {"pixels": Array("uint8", (len(data),), data)}
        )

    def wait_for(self, rows: int) -> None:
        """Wait until the layout of a picture of this many rows is being made."""
        with self.laying:
            assert self.laying.wait_for(lambda: rows in self.rows, 60)

    def close(self) -> None:
        """Nothing runs."""


class Woken:
    """Counts how often the loop is woken."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self) -> None:
        self.event.set()


@pytest.fixture
def processor() -> CountingProcessor:
    return CountingProcessor()


@pytest.fixture
def woken() -> Woken:
    return Woken()


@pytest.fixture
def store(processor: CountingProcessor, woken: Woken) -> MediaStore:
    return MediaStore(processor, INFO, LIMITS, woken, max_bytes=2 * (KEPT + ENTRY_BYTES))


def picture(value: int, rows: int = 2) -> Tensor:
    return Tensor("uint8", (rows, 1, 3), bytes([value]) * (rows * 3))


def prompt(*contents: Tensor, salt: str | None = None, **fields: object) -> Prompt:
    """A prompt of pictures, each after a word."""
    token_ids: list[int] = []
    media = []
    for content in contents:
        token_ids.append(1)
        rows = content.shape[0] if content.data else 2
        name = media_name("image", content, "")
        medium = Media(len(token_ids), 1 + rows, name, content)
        media.append(msgspec.structs.replace(medium, **fields))
        token_ids += [BEGIN, *[PLACE] * rows]
    return Prompt([*token_ids, 1], media, cache_salt=salt)


def wait(pending: PendingMedia, woken: Woken) -> list[Features]:
    """The features, once they are there."""
    while (found := pending.poll()) is None:
        assert woken.event.wait(60)
        woken.event.clear()
    return found


def test_equal_media_are_processed_once_also_at_the_same_time(
    store: MediaStore, processor: CountingProcessor, woken: Woken
) -> None:
    processor.go.clear()
    pending = [store.submit(prompt(picture(1), picture(2)), str(i), F, 0.0) for i in range(20)]
    assert processor.began.wait(60)
    assert all(each.poll() is None for each in pending)
    processor.go.set()
    found = [wait(each, woken) for each in pending]
    assert processor.num_processed == 2
    assert all(features == found[0] for features in found), "they are shared"
    assert [features.size for features in found[0]] == [2, 2]
    assert (store.num_queries, store.num_hits) == (40, 38)


def test_features_are_kept_up_to_a_budget_and_as_long_as_a_request_has_them(
    store: MediaStore, processor: CountingProcessor, woken: Woken
) -> None:
    held = wait(store.submit(prompt(picture(1)), "a", F, 0.0), woken)
    for value in (2, 3, 4, 3):  # there is room for two
        wait(store.submit(prompt(picture(value)), "a", F, 0.0), woken)
    assert processor.num_processed == 4
    assert store.num_bytes == 3 * KEPT
    wait(store.submit(prompt(picture(1)), "a", F, 0.0), woken)
    assert processor.num_processed == 4, "a request has it"
    wait(store.submit(prompt(picture(2)), "a", F, 0.0), woken)
    assert processor.num_processed == 5
    store.reset()
    assert store.num_bytes == held[0].num_bytes


def test_names_and_tokens_are_not_believed(store: MediaStore, woken: Woken) -> None:
    """A wrong name would poison the cache of others, wrong tokens lay embeddings over others."""
    other = media_name("image", picture(2), "")
    wrong = [
        (prompt(picture(1), name=other), "its name is not that of its content"),
        (prompt(picture(1), options='{"a":1}'), "its name is not that of its content"),
        (prompt(picture(1), kind="audio"), "its name is not that of its content"),
        (prompt(picture(0)), "it is black"),
        (prompt(picture(1, rows=6)), "it takes 6 embeddings, and the engine holds 5"),
        (prompt(picture(1), uuid="cat"), "give a cache_salt"),
        (prompt(picture(1), uuid="cat", salt="s"), "its name is not that of its content"),
    ]
    tokens = prompt(picture(1))
    tokens.token_ids[2] = 7
    wrong.append((tokens, "the tokens in its place are not those that stand for it"))
    for each, text in wrong:
        with pytest.raises(ValueError, match=text):
            wait(store.submit(each, "a", F, 0.0), woken)
    assert wait(store.submit(prompt(picture(1)), "a", F, 0.0), woken)


def test_a_callers_name_holds_beside_its_salt_and_then_needs_no_content(
    store: MediaStore, processor: CountingProcessor, woken: Woken
) -> None:
    name = uuid_name("image", "s", "cat", "")
    wait(store.submit(prompt(picture(1), uuid="cat", name=name, salt="s"), "a", F, 0.0), woken)
    wait(store.submit(prompt(NOTHING, uuid="cat", name=name, salt="s"), "a", F, 0.0), woken)
    assert processor.num_processed == 1
    other = uuid_name("image", "t", "cat", "")
    with pytest.raises(ValueError, match="the engine does not have it any more: send its content"):
        wait(store.submit(prompt(NOTHING, uuid="cat", name=other, salt="t"), "a", F, 0.0), woken)


def test_layouts_are_made_once_and_delivered_on_the_thread_that_asks_for_it(
    store: MediaStore, processor: CountingProcessor, woken: Woken
) -> None:
    answers: list[MediaLayout | Exception] = []
    store.lay(("image", (3, 4, 3), ""), "a", F, answers.append)
    assert woken.event.wait(60)
    assert not answers
    store.advance()
    store.lay(("image", (3, 4, 3), ""), "b", F, answers.append)
    assert answers == [MediaLayout([BEGIN, PLACE, PLACE, PLACE])] * 2
    assert processor.num_laid == 1
    for key, text in [
        (("audio", (3,), ""), "no media of the kind 'audio'"),
        (("image", (3, 4), ""), r"\[height, width, 3\] expected"),
        (("image", (3, 0, 3), ""), r"\[height, width, 3\] expected"),
        (("image", (1 << 14, 1 << 14, 3), ""), "one may have 100663296"),
    ]:
        with pytest.raises(ValueError, match=text):
            store.lay(key, "a", F, answers.append)


def test_a_medium_that_must_run_in_one_step_fits_a_step(processor: CountingProcessor, woken: Woken) -> None:
    store = MediaStore(processor, INFO, MediaLimits(5, max_model_len=20, max_tokens=4), woken)
    with pytest.raises(ValueError, match="it takes 5 tokens, which must run in one step, and a step has 4"):
        wait(store.submit(prompt(picture(1, rows=4)), "a", F, 0.0), woken)


def test_what_does_not_fit_the_engine_or_the_prompt_is_refused_at_the_door() -> None:
    outside = prompt(picture(1))
    outside.token_ids[-1] = PLACE
    for each, info, text in [
        (prompt(picture(1)), None, "takes no media of the kind 'image'"),
        (prompt(picture(1), picture(2), picture(3)), INFO, "may have 2 media of the kind image"),
        (outside, INFO, "outside of any"),
        (prompt(picture(1), data=Tensor("float32", (1, 1, 3), bytes(12))), INFO, "uint8 expected"),
        (prompt(picture(1), name=b"cat"), INFO, "32 bytes"),
    ]:
        with pytest.raises(ValueError, match=text):
            check_encoded(each, info)
    check_encoded(prompt(picture(1), picture(2)), INFO)


def test_a_layout_that_no_prompt_has_room_for_is_refused_and_not_kept(
    store: MediaStore, processor: CountingProcessor, woken: Woken
) -> None:
    answers: list[MediaLayout | Exception] = []
    long = '{"more":18}'  # the processor may be told to fill up to millions of tokens
    for _ in range(2):
        store.lay(("image", (2, 1, 3), long), "a", F, answers.append)
        assert woken.event.wait(60)
        woken.event.clear()
        store.advance()
    text = "image: it takes 21 tokens of a prompt, and max_model_len is 20"
    assert [str(error)[: len(text)] for error in answers] == [text, text]
    assert processor.num_laid == 2 and store.num_layout_bytes == 0
    medium = {"name": media_name("image", picture(1), long), "options": long}
    with pytest.raises(ValueError, match=text):
        wait(store.submit(prompt(picture(1), **medium), "a", F, 0.0), woken)
    assert store.num_bytes == 0


def test_layouts_are_kept_up_to_a_budget_of_bytes(
    store: MediaStore, woken: Woken, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes what its tokens and its arguments do."""
    for number in range(40):
        options = json.dumps({"more": 10, "name": "x" * 4000 + str(number)})
        store.lay(("image", (2, 1, 3), options), "a", F, lambda _: None)
        assert woken.event.wait(60)
        woken.event.clear()
    assert 40 * 4000 < store.num_layout_bytes < 40 * (4000 + 1000)
    small = MediaStore(store._processor, INFO, LIMITS, woken, max_layout_bytes=3 * 5000)
    for number in range(40):
        options = json.dumps({"more": 10, "name": "x" * 4000 + str(number)})
        small.lay(("image", (2, 1, 3), options), "a", F, lambda _: None)
        assert woken.event.wait(60)
        woken.event.clear()
    assert 2 * 4000 < small.num_layout_bytes < 3 * 5000


def test_slow_layouts_of_one_tenant_do_not_hold_up_another(
    store: MediaStore, processor: CountingProcessor, woken: Woken
) -> None:
    """Eight sizes of one tenant, then one of another of the same frontend, and one of another frontend."""
    processor.may_lay = threading.Semaphore(0)
    answers: dict[int, MediaLayout | Exception] = {}

    def lay(rows: int, tenant: str, frontend: bytes) -> None:
        store.lay(
            ("image", (rows, 1, 3), ""), tenant, frontend, lambda answer: answers.update({rows: answer})
        )

    for rows in range(1, 9):
        lay(rows, "a", F)
    processor.wait_for(2)
    lay(11, "b", F)
    processor.wait_for(11)  # while the others' are being made
    lay(12, "a", b"another")
    processor.may_lay.release()  # of any that began
    processor.wait_for(12)
    assert len(processor.rows) == 4
    processor.may_lay.release(9)
    while len(answers) < 10:
        assert woken.event.wait(60)
        woken.event.clear()
        store.advance()
