"""What comes from files and from the browser's own store: conversations and settings, checked before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from tests.end_to_end.page.browser import Page

PICTURE = "data:image/png;base64,AAAA"
QUESTION = {"id": "a", "parent": None, "role": "user", "content": "What?"}
ANSWER = {
    "id": "b",
    "parent": "a",
    "role": "assistant",
    "content": "That.",
    "model": "demo",
    "note": "2 tokens",
    "reasoning": "Hm.",
    "calls": [{"id": "c", "name": "f", "arguments": "{}"}],
    "tokens": [["That", -0.5, [["That", -0.5], ["This", None]], False], [".", 0, [], None]],
    "size": 12,
    "cut": False,
}
TALK: dict[str, Any] = {
    "id": "x",
    "title": "A title",
    "changed": 1_700_000_000_000,
    "messages": [QUESTION, ANSWER],
    "leaf": "b",
    "since": None,
}


def altered(at: int, **fields: Any) -> dict[str, Any]:
    """The conversation with other fields in one message."""
    messages = [dict(message) for message in TALK["messages"]]
    messages[at] |= fields
    return {**TALK, "messages": messages}


BAD: dict[str, tuple[Any, str]] = {
    "a number": (7, "it is not an object"),
    "no messages": ({**TALK, "messages": "none"}, "messages is not a list"),
    "too many": ({**TALK, "messages": [QUESTION] * 10_001}, "it has more than 10,000 messages"),
    "message": ({**TALK, "messages": [None]}, "messages[0] is not an object"),
    "title": ({**TALK, "title": {"a": 1}}, "title is not a text"),
    "long title": ({**TALK, "title": "a" * 10_001}, "title has more than 10,000 characters"),
    "changed": ({**TALK, "changed": "today"}, "changed is not a number"),
    "date": ({**TALK, "changed": 1e300}, "changed is no time"),
    "leaf": ({**TALK, "leaf": "z"}, "leaf is none of its messages"),
    "no leaf": ({**TALK, "leaf": None}, "leaf is none of its messages"),
    "since": ({**TALK, "since": "z"}, "since is none of its messages"),
    "role": (altered(0, role="system"), "messages[0].role is none of user, assistant and tool"),
    "role of objects": (altered(0, role="__proto__"), "messages[0].role is none of user, assistant and tool"),
    "content": (altered(0, content=["a"]), "messages[0].content is not a text"),
    "huge": (altered(0, content="a" * 4_000_001), "messages[0].content has more than 4,000,000 characters"),
    "id": (altered(1, id="a"), "messages[1].id is empty, or another message's"),
    "circle": (altered(0, parent="b"), "messages[0].parent is no message before it"),
    "picture": (
        altered(0, pictures=["https://e.org/x.png"]),
        "messages[0].pictures[0] is no data: URL of a picture",
    ),
    "script": (
        altered(0, pictures=["data:image/svg+xml;base64,AAAA"]),
        "messages[0].pictures[0] is no data: URL of a picture",
    ),
    "characters": (
        altered(0, pictures=[PICTURE + "<b>"]),
        "messages[0].pictures[0] is no data: URL of a picture",
    ),
    "pictures": (altered(0, pictures=[PICTURE] * 101), "messages[0].pictures has more than 100 entries"),
    "calls": (altered(1, calls="f"), "messages[1].calls is not a list"),
    "name": (altered(1, calls=[{"name": 1, "arguments": ""}]), "messages[1].calls[0].name is not a text"),
    "tokens": (altered(1, tokens=[["a", "b", [], True]]), "messages[1].tokens[0][1] is not a number"),
    "draft": (
        altered(1, tokens=[["a", 0, [], 1]]),
        "messages[1].tokens[0][3] is neither true, false nor null",
    ),
    "error": (altered(1, error={"message": "x"}), "messages[1].error is not a text"),
    "flag": (altered(1, full="yes"), "messages[1].full is neither true nor false"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_no_conversation_is_refused_with_the_reason(page: Page, name: str) -> None:
    record, reason = BAD[name]
    result = page.run(
        """
        const { conversation, imported } = await import("/page/chat/record.js");
        const { create } = await import("/page/chat/conversation.js");
        try {
            conversation(given[0]);
        } catch (error) {
            return [error.message, imported(JSON.stringify(given[0]), create).problems];
        }
        """,
        record,
    )
    assert result == [reason, [reason]]


def test_a_conversation_has_the_fields_of_one_and_no_others(page: Page) -> None:
    """Keys that objects inherit are neither taken nor passed on."""
    text = json.dumps({**altered(1, extra=1, constructor={"prototype": {"bad": 1}}, error=None), "more": 2})
    text = text.replace('"title"', '"__proto__": {"bad": 1, "leaf": "a"}, "title"').replace(
        '"role"', '"__proto__": {"pictures": ["https://e.org"]}, "role"'
    )
    result = page.run(
        """
        const { conversation } = await import("/page/chat/record.js");
        const made = conversation(JSON.parse(given[0]));
        return { made, keys: Object.keys(made), inherited: [made.bad, {}.bad, made.messages[0].pictures] };
        """,
        text,
    )
    assert result["keys"] == ["id", "title", "changed", "messages", "leaf", "since"]
    assert result["inherited"] == [None, None, None]
    made = result["made"]
    assert made["messages"][0] == QUESTION
    assert made["messages"][1] == {**ANSWER, "tokens": made["messages"][1]["tokens"]}
    assert made["leaf"] == "b"


def notice(page: Page, part: str) -> str:
    """Wait for a notice that says this; all of it."""
    page.until(f"document.querySelector('#notice').textContent.includes({json.dumps(part)})")
    return page.find("#notice span").text


def test_the_page_says_what_was_not_imported(page: Page, tmp_path: Path) -> None:
    def give(name: str, content: str) -> None:
        file = tmp_path / name
        file.write_text(content)
        page.run("document.querySelector('#notice').replaceChildren()")
        page.find("#import-file").send_keys(str(file))

    give("a.json", "{")
    assert notice(page, "not imported") == "a.json was not imported: it is no JSON."
    give("deep.json", "[" * 100_000 + "]" * 100_000)
    assert "deep.json was not imported: it is" in notice(page, "not imported")
    give("b\u202etxt.json", json.dumps([]))
    assert notice(page, "not imported") == "b txt.json was not imported: it has no conversations."
    give("c.json", json.dumps([TALK, altered(0, content=1), 7]))
    assert notice(page, "was added") == (
        "c.json: 1 conversation was added, 2 were not (conversation 2: messages[0].content is not a text)."
    )
    give("d.json", json.dumps(TALK))
    assert notice(page, "was added") == "1 conversation was added."
    assert len(page.all("#conversations li")) == 2


def test_an_imported_answer_stops_nothing(page: Page, tmp_path: Path) -> None:
    """The page is ready again with it, and shows all of its text."""
    file = tmp_path / "bad.json"
    content = ">" * 4000 + "\n\n" + "a" + " " * 20_000 + "b\n\n" + "*" * 20_000 + "c" + "*" * 20_000
    name = "\u202eevil<img src=x onerror=alert(1)>" + "n" * 5000
    calls = [{"id": "c", "name": name, "arguments": "[" * 5000 + "]" * 5000}]
    error = "<script>alert(1)</script>"
    file.write_text(
        json.dumps(
            altered(1, content=content, calls=calls, error=error, model=name, note=name, reasoning=content)
        )
    )
    page.find("#import-file").send_keys(str(file))
    page.until("document.querySelectorAll('#conversations li').length === 1")
    page.find("#conversations .open").click()
    page.until("document.querySelectorAll('#messages > li').length === 2")
    page.reload()
    text = page.find("#messages > li:last-child").get_property("textContent")
    assert ">" * 4000 in text and "c" in text and error in text
    assert page.all("#messages img, #messages script") == []
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")


def put(page: Page, record: Any) -> None:
    """Store a record as the page stores its own, or a fault."""
    page.run(
        "const { put } = await import('/page/chat/store.js'); await put(JSON.parse(given[0]));",
        json.dumps(record),
    )


def test_stored_records_are_checked_and_stay(page: Page) -> None:
    put(page, TALK)
    put(page, {**altered(1, content=None), "id": "y"})
    put(page, {"id": "z", "messages": {"length": -1}})
    page.reload()
    assert "2 stored records are no conversations of this page" in page.find("#notice").text
    assert len(page.all("#conversations li")) == 1
    assert page.find("#messages > .assistant .text").text == "That."
    stored = page.run(
        "const { all } = await import('/page/chat/store.js'); return (await all()).map(({ id }) => id).sort();"
    )
    assert stored == ["x", "y", "z"]


@pytest.mark.parametrize(
    "kept", ["{", "null", "[]", "7", '"a"', '{"system": {"a": 1}, "length": "3", "key": "k"}']
)
def test_broken_settings_are_as_none(page: Page, kept: str) -> None:
    page.run("localStorage.setItem('pagewire.settings', given[0])", kept)
    page.reload()
    assert page.find("#settings [name=system]").get_property("value") == ""
    assert page.find("#settings [name=key]").get_property("value") != "k"
    page.ask("What is a set?")
    assert page.answered(2)


def test_many_conversations_are_listed_in_part(page: Page, tmp_path: Path) -> None:
    file = tmp_path / "many.json"
    file.write_text(json.dumps([{**TALK, "title": f"talk-{n}."} for n in range(520)]))
    page.find("#import-file").send_keys(str(file))
    assert notice(page, "were added") == "520 conversations were added."
    assert len(page.all("#conversations li")) == 500
    assert page.find("#none-found").text == "20 older ones are not listed: search."
    page.find("#search").send_keys("talk-7.")
    page.until("document.querySelectorAll('#conversations li').length === 1")


def test_much_of_an_answer_is_shown_in_part(page: Page) -> None:
    """Tokens beyond what a browser shows quickly, and JSON that would be indented by millions of spaces."""
    calls = [{"id": "c", "name": "f", "arguments": "[" * 3000 + "]" * 3000}]
    tokens = [["a", -0.5, [], False]] * 12_000
    put(page, {**altered(1, calls=calls, tokens=tokens)})
    page.reload()
    assert page.find("#messages .call pre").get_property("textContent") == calls[0]["arguments"]
    page.click("#messages [aria-label='Show tokens']")
    assert "the first 10,000 of 12,000 tokens" in page.find("#messages .legend").text
    assert page.run("return document.querySelectorAll('#messages .text-tokens .token').length") == 10_000


def test_halves_of_characters_are_not_sent(page: Page) -> None:
    body = page.run(
        """
        const { post } = await import("/page/net/api.js");
        const fetched = window.fetch;
        let body = null;
        window.fetch = (address, options) => ((body = options.body), Promise.resolve(new Response("{}")));
        await post("none", { content: `a${String.fromCharCode(0xd800)}b`, same: "\U0001f469", list: [1, null] });
        window.fetch = fetched;
        return body;
        """
    )
    assert json.loads(body) == {"content": "a\ufffdb", "same": "\U0001f469", "list": [1, None]}


def test_a_browser_that_stores_nothing_still_shows_the_page(page: Page) -> None:
    result = page.run(
        """
        const { keep, kept, keptInTab } = await import("/page/storage.js");
        const { getItem, setItem } = Storage.prototype;
        const refuse = () => { throw new DOMException("no", "SecurityError"); };
        Object.assign(Storage.prototype, { getItem: refuse, setItem: refuse });
        try {
            return [kept("a"), keptInTab("a"), keep("a", "b")];
        } finally {
            Object.assign(Storage.prototype, { getItem, setItem });
        }
        """
    )
    assert result == [None, None, False]
