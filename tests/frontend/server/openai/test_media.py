"""Pictures and sounds over HTTP: from every API to the core's message, and what attacks on them come to."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from pagewire.frontend.api.llm import LLM
from pagewire.frontend.media import decode_process, loader
from pagewire.frontend.media.access import MediaAccess
from pagewire.frontend.media.decode_process import decode
from pagewire.frontend.media.intake import media_intake
from pagewire.frontend.text.prompts import TextPrompt
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import EmbeddingsInfo
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.media import MediaInfo, MediumInfo, media_name, uuid_name
from pagewire.ipc.wire.messages import EngineInfo
from tests.benchmarks.loading import load_from
from tests.frontend.conftest import FakeCore
from tests.frontend.media.attack_server import AttackServer
from tests.frontend.server.client import Answer, Client

files = load_from("siege", "media_files")
PICTURE, SOUND = 64, 65  # the tokens <image> and <audio>
ROW = 62  # the token at the end of a row of a picture
RATE = 16_000
INFO = MediaInfo(
    kinds={
        "image": MediumInfo(PICTURE, "<image>", PICTURE, limit=3, max_tokens=64),
        "audio": MediumInfo(SOUND, "<audio>", SOUND, limit=1, max_tokens=64),
    },
    sampling_rate=RATE,
    embedding_size=4,
)
RED, BLUE = files.plain_png(3, 2, (250, 0, 0)), files.plain_png(2, 2, (0, 0, 250))
HIGH, WIDE = files.plain_png(1, 3), files.plain_png(4, 1)
SHOT = files.wav(1600)


def layout_of(kind: str, shape: Sequence[int], options: str = "", tenant: str = "") -> dict[str, Any]:
    """A row of one token for each row of a picture; a token for each 100 ms of a sound."""
    more = json.loads(options or "{}").get("more", 0)
    ids = [PICTURE, ROW] * shape[0] if kind == "image" else [SOUND] * (shape[0] // 1600)
    return {"token_ids": ids + [ROW] * more}


@pytest.fixture(scope="module")
def folder(word_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer with the tokens of media."""
    from tokenizers import AddedToken, Regex, Tokenizer, normalizers

    folder = tmp_path_factory.mktemp("media")
    shutil.copytree(word_tokenizer, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, lstrip=True) for text in ("<image>", "<audio>")])
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s"), " ")
    assert tokenizer.encode("<image>\nw5 <audio> w6").ids == [PICTURE, 5, SOUND, 6]
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def engine_info(engine_info: EngineInfo, folder: Path) -> EngineInfo:
    places = {"model_path": str(folder), "tokenizer": str(folder)}
    takes = EmbeddingsInfo(size=4, prompts=True)
    return msgspec.structs.replace(engine_info, media=INFO, vocab_size=66, embeddings=takes, **places)


@pytest.fixture(autouse=True)
def layouts(core: FakeCore) -> None:
    core.auto = True
    core.calls["media_layout"] = layout_of


@pytest.fixture(scope="module")
def web() -> Iterator[AttackServer]:
    server = AttackServer()
    server.contents |= {"/red": RED, "/blue": BLUE}
    yield server
    server.close()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def picture(data: bytes | str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_url(data)}}


def user(*parts: Any) -> list[Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def chat(client: Client, *parts: Any, **fields: Any) -> Answer:
    return client.request("POST", "/v1/chat/completions", {"messages": user(*parts), **fields})


def submitted(core: FakeCore) -> tuple[list[int], list[Media]]:
    """The prompt of the request that came last."""
    prompt = core.submitted[max(core.submitted)].prompt
    return prompt.token_ids, prompt.media


def shapes(media: list[Media]) -> list[tuple[int, ...]]:
    return [medium.data.shape for medium in media]


# ---------------------------------------------------------------- every way in


def test_a_picture_and_a_sound_take_their_places(client: Client, core: FakeCore) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": base64.b64encode(SHOT).decode(), "format": "wav"}}
    answer = chat(client, "w5", picture(RED), sound, picture(BLUE))
    assert answer.status == 200, answer.body
    ids, media = submitted(core)
    # This template takes text: placeholders come first, pictures before sounds.
    rows = [PICTURE, ROW] * 2
    assert ids == [*rows, *rows, SOUND, SOUND, 5]
    assert answer.json["usage"]["prompt_tokens"] == len(ids)
    assert shapes(media) == [(2, 3, 3), (2, 2, 3), (3200,)]
    assert [(medium.start, medium.num_tokens) for medium in media] == [(0, 4), (4, 4), (8, 2)]
    assert bytes(media[0].data.data) == bytes([250, 0, 0]) * 6
    assert all(medium.name == media_name(medium.kind, medium.data, "") for medium in media)


TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'image' %} <image>{% elif p.type == 'audio' %} <audio>{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)


def test_templates_that_know_pictures_put_them_where_they_are(
    serve: Callable[..., Client], core: FakeCore
) -> None:
    client = serve(chat_template=TEMPLATE, trust_request_chat_template=True)
    for fields in ({}, {"chat_template": TEMPLATE}):  # the second is rendered in a process of its own
        assert chat(client, "w5", picture(HIGH), "w6", picture(WIDE), "w7", **fields).status == 200
        ids, media = submitted(core)
        assert ids == [5, *[PICTURE, ROW] * 3, 6, PICTURE, ROW, 7]
        assert shapes(media) == [(3, 1, 3), (1, 4, 3)]


def test_text_that_has_the_placeholder_has_placed_the_picture(client: Client, core: FakeCore) -> None:
    assert chat(client, "w5 <image> w6", picture(WIDE)).status == 200
    assert submitted(core)[0] == [5, PICTURE, ROW, 6]
    assert "2 places for them" in chat(client, "<image> <image>", picture(WIDE)).error["message"]
    assert "outside of any" in chat(client, "w5 <image>").error["message"]


def test_pictures_of_low_detail_are_made_smaller(client: Client, core: FakeCore) -> None:
    url = data_url(files.plain_png(1024, 2))
    for detail, size in (("low", 512), ("high", 1024), ("auto", 1024), (None, 1024)):
        part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
        assert chat(client, part).status == 200
        assert submitted(core)[1][0].data.shape == (size // 512, size, 3)
        item = {"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": detail}]}
        assert client.request("POST", "/v1/responses", {"model": "fake", "input": [item]}).status == 200
        assert submitted(core)[1][0].data.shape == (size // 512, size, 3)


def test_other_apis_send_the_same(client: Client, core: FakeCore) -> None:
    text, wide = base64.b64encode(WIDE).decode(), {"type": "input_image", "image_url": data_url(WIDE)}
    source = {"type": "base64", "media_type": "image/png", "data": text}
    image = {"type": "image", "source": source}
    said = {"type": "text", "text": "w5"}
    calls: list[tuple[str, dict[str, Any]]] = [
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [wide, {"type": "input_text", "text": "w5"}]}]},
        ),
        ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": [image, said]}]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "w5", "images": [text]}], "stream": False}),
        ("/api/generate", {"prompt": "w5", "images": [text], "stream": False}),
    ]
    for path, body in calls:
        answer = client.request("POST", path, {"model": "fake", **body})
        assert answer.status == 200, (path, answer.body)
        ids, media = submitted(core)
        assert (ids, shapes(media)) == ([PICTURE, ROW, 5], [(1, 4, 3)]), path
    counts = [
        ("/tokenize", {"messages": user("w5", picture(WIDE))}, "count"),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [image, said]}]},
            "input_tokens",
        ),
        ("/v1/responses/input_tokens", {"input": calls[0][1]["input"]}, "input_tokens"),
    ]
    for path, body, name in counts:
        assert client.request("POST", path, {"model": "fake", **body}).json[name] == 3, path


def test_python_objects(core: FakeCore, engine_info: EngineInfo) -> None:
    import numpy as np
    import torch
    from PIL import Image

    rows = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    with LLM.attach(core.address) as llm:

        def media_of(
            data: dict[str, Any], prompt: str = "<image> w5", **more: Any
        ) -> tuple[list[int], list[Media]]:
            llm.generate(TextPrompt(prompt=prompt, multi_modal_data=data, **more), use_tqdm=False)
            return submitted(core)

        for value in (Image.fromarray(rows), rows, rows.transpose(2, 0, 1), torch.from_numpy(rows), [rows]):
            ids, media = media_of({"image": value})
            assert ids == [*[PICTURE, ROW] * 2, 5] and bytes(media[0].data.data) == rows.tobytes()
        assert shapes(media_of({"image": RED})[1]) == [(2, 3, 3)]
        ids, media = media_of({"image": rows}, mm_processor_kwargs={"more": 1})
        assert ids == [*[PICTURE, ROW] * 2, ROW, 5] and media[0].options == '{"more":1}'
        for sound in (
            (np.ones(800, np.float32), 8000),
            np.ones(1600, np.float64),
            (np.ones(1600), RATE),
            SHOT,
        ):
            ids, media = media_of({"audio": sound}, "<audio> w5")
            assert ids[-1] == 5 and media[0].data.dtype == "float32"
        for embeddings in (torch.ones(1, 3, 4), np.ones((3, 4), np.float16)):
            ids, media = media_of({"image": embeddings})
            assert ids == [0, 0, 0, 5] and media[0].embeddings
        messages = user({"type": "image", "image": Image.fromarray(rows)}, "w5")
        llm.chat(messages, use_tqdm=False)
        assert submitted(core)[0] == [*[PICTURE, ROW] * 2, 5]
        for data, message in (
            ({"video": rows}, "'video', and the model takes image, audio only"),
            ({"image": np.ones((2, 5), np.float32)}, r"must have the shape \[number of tokens, 4\]"),
            (
                {"image": rows.astype(np.int32)},
                r"multi_modal_data\['image'\]\[0\] must be a PIL image.*int32",
            ),
            ({"image": "picture.png"}, "must be a PIL image.*got 'str'"),
            ({"image": [rows] * 4}, "a prompt may have 3 pictures"),
            ({"audio": np.ones((2, 5), np.float32)}, "must be a pair of float samples"),
            ({"audio": (np.ones(5, np.float32), -1)}, "number of samples a second"),
            ([rows], "must be a dict by kind"),
        ):
            with pytest.raises(ValueError, match=message):
                media_of(data)
        with pytest.raises(ValueError, match="beam search takes no pictures"):
            from pagewire.ipc.wire.params import BeamSearchParams

            llm.beam_search(
                [TextPrompt(prompt="<image>", multi_modal_data={"image": rows})], BeamSearchParams(2, 2)
            )


def test_names_of_the_caller_hold_beside_a_salt(core: FakeCore) -> None:
    import numpy as np

    rows = np.zeros((2, 3, 3), np.uint8)
    with LLM.attach(core.address) as llm:

        def ask(data: Any, uuids: Any, salt: str | None) -> list[Media]:
            prompt = TextPrompt(prompt="<image> w5", multi_modal_data=data, multi_modal_uuids=uuids)
            if salt is not None:
                prompt["cache_salt"] = salt
            llm.generate(prompt, use_tqdm=False)
            return submitted(core)[1]

        (first,) = ask({"image": rows}, {"image": ["mine"]}, "salt")
        assert first.name == uuid_name("image", "salt", "mine", "") and first.uuid == "mine"
        (again,) = ask(None, {"image": "mine"}, "salt")
        assert (again.name, again.num_tokens, again.data.shape) == (first.name, 4, (0,))
        with pytest.raises(ValueError, match="need a cache_salt"):
            ask({"image": rows}, {"image": ["mine"]}, None)
        with pytest.raises(ValueError, match="nothing is known by the name 'mine' any more"):
            ask(None, {"image": ["mine"]}, "other")
        with pytest.raises(ValueError, match="2 names for 1"):
            ask({"image": rows}, {"image": ["a", "b"]}, "salt")


def test_a_model_of_text_refuses_by_name(engine: AsyncLLM, serve: Callable[..., Client]) -> None:
    text_only = msgspec.structs.replace(engine.session.info, media=None)
    engine.session.info = text_only
    engine.session.intake.media = None
    client = serve()
    for part, message in (
        (
            picture(RED),
            "messages[0].content[1]: the model takes no pictures: give text; got a part",
        ),
        ({"type": "input_audio"}, "the model takes no sounds"),
        ({"type": "video_url"}, "the model takes no videos: give some of their pictures"),
        ({"type": "file"}, "the model takes no files"),
    ):
        answer = chat(client, "w5", part)
        assert answer.status == 400 and message in answer.error["message"]
    assert "mm_processor_kwargs" in chat(client, "w5", mm_processor_kwargs={"a": 1}).error["message"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, "needs a URL"),
        ({"type": "image_url", "image_url": {"url": 5}}, "multi_modal|must be a PIL image|needs a URL"),
        ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "only http, https, data and"),
        (
            {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
            "must be like data:image/png;base64",
        ),
        ({"type": "image_url", "image_url": {"url": "data:;base64,a"}}, "not valid base64"),
        (
            {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            "has no --allowed-local-media-path",
        ),
        ({"type": "image_url", "image_url": {"url": "file://host/a"}}, "must not name another host"),
        ({"type": "input_image", "file_id": "f"}, "files are not kept"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "full"}}, "one of auto, high, low"),
        ({"type": "input_image", "image_url": "x", "detail": ["low"]}, "one of auto, high, low"),
        ({"type": "image_embeds", "image_embeds": "x"}, "give embeddings by multi_modal_data"),
        (
            {"type": "input_audio", "input_audio": {"data": "x", "format": "aac"}},
            "one of wav, mp3, flac, ogg",
        ),
        ({"type": "input_audio", "input_audio": 1}, "needs data"),
        ({"type": "image_url", "image_url": None, "uuid": "u"}, "need a cache_salt"),
        ({"type": "image_url", "image_url": "x", "uuid": 5}, "uuid must be a string"),
    ],
)
def test_malformed_parts(client: Client, part: Any, message: str) -> None:
    import re

    answer = chat(client, part)
    assert answer.status == 400 and re.search(message, answer.error["message"]), answer.body


# ---------------------------------------------------------------- attacks


def with_access(engine: AsyncLLM) -> None:
    """Let 127.0.0.1 be as if it were public."""
    access = MediaAccess(None, (ip_network("127.0.0.1/32"),))
    session = engine.session
    session.intake.media = media_intake(INFO, access, session.call, session.info.max_model_len)


def test_a_layout_that_no_prompt_has_room_for_is_refused_and_not_kept(
    client: Client, engine: AsyncLLM
) -> None:
    """The frontend trusts no core, as the core trusts no frontend."""
    media = engine.session.intake.media
    assert media is not None
    for more in (1_000_000, 1_000_001):
        answer = chat(client, picture(RED), mm_processor_kwargs={"more": more})
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded", answer.body
        assert f"it takes {more + 4} tokens of a prompt" in answer.error["message"]
    assert media._layouts.num_bytes == 0
    assert chat(client, picture(RED), mm_processor_kwargs={"more": 1}).status == 200
    assert 0 < media._layouts.num_bytes < 1000


def test_layouts_are_asked_for_in_the_name_of_the_tenant(
    serve: Callable[..., Client], core: FakeCore
) -> None:
    names: list[str] = []

    def recorded(kind: str, shape: Sequence[int], options: str = "", tenant: str = "") -> dict[str, Any]:
        names.append(tenant)
        return layout_of(kind, shape, options)

    core.calls["media_layout"] = recorded
    client = serve(api_key=["alice-secret-key", "bob-secret-key"])
    for key, data in (("alice", HIGH), ("bob", WIDE)):
        body = {"messages": user(picture(data))}
        headers = {"authorization": f"Bearer {key}-secret-key"}
        assert client.post("/v1/chat/completions", body, **headers).status == 200
    assert names == ["key-1", "key-2"]


def test_ten_thousand_tiny_pictures_cost_nothing(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted before the first of them is fetched or decoded."""
    monkeypatch.setattr(loader, "decode", lambda *_: pytest.fail("decoded"))
    answer = chat(client, *[picture(files.plain_png(1, 1))] * 10_000)
    assert answer.status == 400 and "a prompt may have 3 pictures" in answer.error["message"]


@pytest.mark.parametrize("name", [name for name in files.BOMBS if "many scans" not in name])
def test_a_bomb_ends_its_request_alone(name: str, client: Client, core: FakeCore) -> None:
    kind, make = files.BOMBS[name]
    part = (
        picture(make()) if kind == "image" else {"type": "audio_url", "audio_url": {"url": data_url(make())}}
    )

    async def both() -> list[Answer]:
        messages = [user(part), user("w5"), user(picture(RED), "w6")]
        calls = [client.call("POST", "/v1/chat/completions", {"messages": each}) for each in messages]
        return [await call.answer() for call in calls]

    bad, text, good = client.run(both)
    assert bad.status == 400 and bad.error["message"].startswith("messages[0].content[0]: a ")
    assert text.status == good.status == 200


def test_attacks_on_fetching_end_their_request_alone(
    client: Client, engine: AsyncLLM, web: AttackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Private addresses, directly and by redirect, endless, slow and silent bodies, beside good requests."""
    monkeypatch.setenv("PAGEWIRE_IMAGE_FETCH_TIMEOUT", "3")
    with_access(engine)
    urls = {
        web.url("/red", "127.0.0.2"): "no public address",
        web.url("/red", "localhost"): "",  # which is 127.0.0.1
        web.url("/redirect?" + web.url("/red", "127.0.0.2")): "no public address",
        web.url("/redirect?http://169.254.169.254/latest/meta-data"): "no public address",
        web.url("/redirect?file:///etc/passwd"): "only http",
        web.url("/endless"): "more than 33554432 bytes|took more than|bytes a second",
        web.url("/slow"): "bytes a second|took more than",
        web.url("/silent"): "took more than 3 s",
    }

    async def all_at_once() -> tuple[list[Answer], list[Answer]]:
        bad = [client.call("POST", "/v1/chat/completions", {"messages": user(picture(url))}) for url in urls]
        good = [
            client.call("POST", "/v1/chat/completions", {"messages": user(*parts)})
            for parts in (("w5",), (picture(BLUE), "w6"))
        ]
        early = [await asyncio.wait_for(call.answer(), 20) for call in good]
        return early, [await asyncio.wait_for(call.answer(), 60) for call in bad]

    import re

    good, bad = client.run(all_at_once)
    assert [answer.status for answer in good] == [200, 200]
    for (url, message), answer in zip(urls.items(), bad, strict=True):
        assert answer.status == (400 if message else 200), (url, answer.body)
        if message:
            assert re.search(message, answer.error["message"]), (url, answer.body)


def test_the_same_picture_in_many_requests_is_fetched_and_decoded_once(
    client: Client, engine: AsyncLLM, core: FakeCore, web: AttackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    lock = threading.Lock()

    def counted(kind: str, data: bytes, *rates: int) -> Tensor:
        with lock:
            decoded.append(len(data))
        return decode(kind, data, *rates)

    monkeypatch.setattr(loader, "decode", counted)
    with_access(engine)
    web.seen.clear()
    assert chat(client, picture(web.url("/red"))).status == 200

    async def many() -> list[Answer]:
        parts = [picture(web.url("/red")), picture(RED)]
        calls = [
            client.call("POST", "/v1/chat/completions", {"messages": user(parts[index % 2])})
            for index in range(64)
        ]
        return [await call.answer() for call in calls]

    assert {answer.status for answer in client.run(many)} == {200}
    assert len(decoded) == 1 and web.seen["/red"] == 1
    names = {request.prompt.media[0].name for request in core.submitted.values()}
    assert len(names) == 1
    before = decode_process.decode_processes().pid
    assert chat(client, picture(RED), cache_salt="another").status == 200 and len(decoded) == 2
    assert decode_process.decode_processes().pid == before
