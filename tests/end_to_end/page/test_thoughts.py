"""A model that thinks, on an engine that drafts: what the page shows of both."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from tests.end_to_end.conftest import SMALL_CORE
from tests.end_to_end.page.browser import Page, serving
from tests.end_to_end.thinker import make_thinker

# Requests have further fields, which the page has none for.
MORE = """
const fetched = window.fetch;
window.fetch = (address, options) => {
    if (!String(address).endsWith("/chat/completions")) return fetched(address, options);
    return fetched(address, { ...options, body: JSON.stringify({ ...JSON.parse(options.body), ...given[0] }) });
};
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("thinker") / "model"
    make_thinker(folder)
    drafts = ("--speculative-config", json.dumps({"method": "suffix"}))
    parser = ("--reasoning-parser", "deepseek_r1", "--served-model-name", "thinker")
    with serving(str(folder), *SMALL_CORE, *parser, *drafts) as url:
        yield url


def test_thoughts_are_folded_away_once_the_answer_begins(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "80")
    page.run(MORE, {"thinking_token_budget": 30})  # which this model needs, for it never ends its thoughts
    page.chromium.execute_script(
        """
        window.states = [];
        new MutationObserver(() => {
            const item = document.querySelector("#messages > li:last-child.assistant");
            const thoughts = item?.querySelector(".thoughts:not([hidden])");
            const state = thoughts && `${thoughts.open} ${Boolean(item.querySelector(".text").textContent)}`;
            if (state && state !== states.at(-1)) states.push(state);
        }).observe(document.querySelector("#messages"),
            { childList: true, subtree: true, characterData: true, attributes: true });
        """
    )
    page.ask("What is a tuple?")
    text = page.answered(2)
    assert text
    states = page.run("return window.states")
    assert states[0] == "true false" and states[-1] == "false true"  # open while there is nothing else
    page.click("#messages .thoughts summary")
    thoughts = page.find("#messages .thoughts > div").text
    assert thoughts and thoughts not in text
    page.reload()
    assert page.find("#messages .thoughts > div").get_property("textContent").strip() == thoughts


def test_drafts_are_marked(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "12")
    page.run("document.querySelector('[name=probabilities]').click()")
    # All drafts are right if only one token is allowed (" list").
    page.run(MORE, {"allowed_token_ids": [533], "ignore_eos": True})
    page.ask("What is a tuple?")
    page.answered(2)
    page.click("#messages > li:last-child [aria-label='Show tokens']")
    tokens = page.all("#messages .text-tokens .token")
    drafts = page.all("#messages .text-tokens .draft")
    assert len(tokens) == 12 and 0 < len(drafts) < 12
    assert f"{len(drafts)} were drafts" in page.find("#messages .legend").text
    page.run("document.querySelector('.text-tokens .draft').focus()")
    assert "A draft proposed it" in page.find("#messages .detail").text
