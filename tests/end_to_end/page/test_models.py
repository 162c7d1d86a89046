"""Several models on one server: one that chats, one that sees, one that makes embeddings."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.keys import Keys

from tests.end_to_end.conftest import SMALL_CORE
from tests.end_to_end.page.browser import Page, serving
from tests.end_to_end.page.test_access import axe, outside, phone, violations
from tests.frontend.word_pieces import write_tokenizer
from tests.workers.media.checkpoints import BY_NAME
from tests.workers.pooled import sentence_transformer, write

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<image> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}"
)
LINES = ["a dog ran", "the cat sat on a mat", "query", "the cat sat"]
# Calls of fetch are kept, and go on.
WATCH = """
window.sent = [];
const fetched = window.fetch;
window.fetch = (address, options) => {
    if (String(address).includes("/v1/")) window.sent.push([String(address), JSON.parse(options.body)]);
    return fetched(address, options);
};
"""


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that embeds by the mean of its tokens."""
    folder = write(tmp_path_factory.mktemp("bert"), "bert")
    sentence_transformer(folder, "mean_tokens")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, bert: Path) -> Iterator[str]:
    llava = BY_NAME["llava"].write(tmp_path_factory.mktemp("llava"))
    (llava / "chat_template.jinja").write_text(TEMPLATE)
    common = {"dtype": "float32", "weight_cache": False}
    sees = common | {"model": str(llava), "served_model_name": ["eye"], "max_model_len": 512}
    sees |= {"num_gpu_blocks_override": 200, "limit_mm_per_prompt": {"image": 3}}
    embeds = common | {"model": str(bert), "served_model_name": ["near"]}
    with serving("demo", *SMALL_CORE, "--also", json.dumps(sees), "--also", json.dumps(embeds)) as url:
        yield url


def png(colour: str, side: int = 40) -> bytes:
    file = BytesIO()
    Image.new("RGB", (side, side), colour).save(file, "PNG")
    return file.getvalue()


def give(page: Page, event: str, content: bytes, kind: str = "image/png") -> None:
    """Drop or paste a file."""
    page.run(
        """
        const [event, content, type] = given;
        const data = new DataTransfer();
        const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
        data.items.add(new File([bytes], "given.png", { type }));
        const all = { bubbles: true, cancelable: true };
        const made = event === "paste" ? new ClipboardEvent("paste", { ...all, clipboardData: data })
            : new DragEvent(event, { ...all, dataTransfer: data });
        document.querySelector("#question").dispatchEvent(made);
        """,
        event,
        base64.b64encode(content).decode(),
        kind,
    )


def test_a_model_is_picked_and_kept(page: Page) -> None:
    names = [option.text for option in page.all("#model option")]
    assert names == ["demo", "eye"] and page.find("#embed-link").is_displayed()
    page.run("const list = document.querySelector('#model'); list.value = 'eye'; list.onchange()")
    page.until("document.querySelector('#welcome-model').textContent === 'eye'")
    assert page.find("#settings [name=model]").get_property("value") == "eye"
    assert "sees pictures" in page.find("#welcome-pictures").text
    questions = [button.text for button in page.all("#suggestions button")]
    assert len(questions) == 3 and "What is the with statement?" not in questions
    page.reload()
    assert page.find("#model").get_property("value") == "eye"
    capabilities = page.run(
        """
        const { post } = await import("/page/net/api.js");
        return (await (await post("api/show", { model: "eye" })).json()).capabilities;
        """
    )
    assert capabilities == ["completion", "vision"]
    page.show("engine")
    models = page.until(
        "document.querySelectorAll('#engine-model option').length === 3 && "
        "[...document.querySelectorAll('#engine-model option')].map((option) => option.value)"
    )
    assert models == ["demo", "eye", "near"]


def test_pictures_by_file_drop_and_paste(page: Page, tmp_path: Path) -> None:
    give(page, "drop", png("red"))
    page.until("document.querySelector('#notice').textContent.includes('takes no pictures')")
    page.run("const list = document.querySelector('#model'); list.value = 'eye'; list.onchange()")
    page.until("!document.querySelector('#attach').hidden")
    (tmp_path / "large.png").write_bytes(png("blue", 3000))
    page.find("#files").send_keys(str(tmp_path / "large.png"))
    page.until("document.querySelectorAll('#attached img').length === 1")
    give(page, "drop", png("red"))
    page.until("document.querySelectorAll('#attached img').length === 2")
    give(page, "paste", png("lime"))
    page.until("document.querySelectorAll('#attached img').length === 3")
    give(page, "paste", b"no picture")
    page.until("document.querySelector('#notice').textContent.includes('cannot be read as a picture')")
    give(page, "paste", b"%PDF", "application/pdf")
    page.until("document.querySelector('#notice').textContent.includes('pictures are PNG')")
    page.click("#attached [aria-label='Remove picture 2']")
    page.until("document.querySelectorAll('#attached img').length === 2")
    page.open_settings()
    page.set("max_tokens", "4")
    page.run(WATCH)
    page.ask("w5 w6")
    page.answered(2)
    assert "4 tokens" in page.find("#messages > li:last-child .note").text
    ((address, body),) = page.run("return window.sent")
    assert address.endswith("/v1/chat/completions") and body["model"] == "eye"
    parts = body["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    pictures = [
        Image.open(BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2]))).convert("RGB")
        for part in parts[:2]
    ]
    assert [picture.size for picture in pictures] == [(2048, 2048), (40, 40)]
    assert [picture.getpixel((5, 5)) for picture in pictures] == [(0, 0, 255), (0, 255, 0)]
    page.reload()
    sizes = page.until(
        """(() => {
            const all = [...document.querySelectorAll('#messages .pictures img')];
            const widths = all.map((picture) => picture.naturalWidth);
            return all.length === 2 && widths.every(Boolean) && widths;
        })()"""
    )
    assert sizes == [2048, 40]


def test_the_nearest_lines_are_those_of_transformers(page: Page, bert: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModel

    model, tokenizer = AutoModel.from_pretrained(bert), Tokenizer.from_file(str(bert / "tokenizer.json"))

    def embedded(text: str) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([tokenizer.encode(text).ids]))[0][0].mean(0)

    query = "the cat ran"
    scores = {line: torch.cosine_similarity(embedded(query), embedded(line), 0).item() for line in LINES}
    page.show("embed")
    page.run(
        "document.querySelector('#embed [name=lines]').value = given[0]", "\n".join([*LINES, "", LINES[0]])
    )
    field = page.find("#embed [name=query]")
    field.clear()
    field.send_keys(query, Keys.ENTER)
    page.until("document.querySelectorAll('#nearest li').length === 4")
    shown = dict(
        page.run(
            "return [...document.querySelectorAll('#nearest li')].map((li) => "
            "[li.querySelector('span').textContent, Number(li.querySelector('output').textContent)])"
        )
    )
    assert list(shown) == sorted(LINES, key=lambda line: -scores[line])
    assert shown == pytest.approx(scores, abs=2e-3)
    page.click("#nearest li:last-child button")  # what is near that line
    page.until("document.querySelector('#nearest output').textContent === '1.000'")
    assert "all known from before" in page.find("#embed-note").text
    with phone(page):
        for view in ("embed", "engine", "compare", "chat", "embed"):
            page.show(view)
            assert outside(page) == []
    if (script := axe()) is not None:
        page.chromium.execute_script(script)
        assert violations(page) == []


def test_two_models_side_by_side(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "5")
    page.run(WATCH)
    page.show("compare")
    page.find("#compare-question").send_keys("w5 w6", Keys.ENTER)
    page.until(
        "[...document.querySelectorAll('.column .answer .note')].filter((note) => note.textContent).length === 2"
    )
    requests: list[Any] = page.run("return window.sent.map(([, body]) => body.model)")
    assert sorted(requests) == ["demo", "eye"]
