"""What keys and buttons do: focus, edits, columns of a comparison, and errors, each of which is said once."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.keys import Keys

from tests.end_to_end.page.browser import Page
from tests.end_to_end.page.test_access import phone

PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


def focused(page: Page) -> str:
    """The id of the element that has the focus, or its tag."""
    found: str = page.run("return document.activeElement.id || document.activeElement.localName")
    return found


def test_the_list_beside_the_chat_leaves_the_focus_where_it_is(page: Page) -> None:
    assert page.find("#history").get_property("open") is True
    assert focused(page) != "close-history"
    page.find("#open-history").click()
    page.find("#open-history").click()
    assert page.find("#history").get_property("open") is True and focused(page) == "open-history"
    page.find("#open-settings").click()
    assert page.run("return document.activeElement.name") == "model"
    page.find("#settings").send_keys(Keys.ESCAPE)
    with phone(page):
        page.find("#open-history").click()
        assert page.run("return document.querySelector('#history').matches(':modal')")
        assert focused(page) == "history-title"
        page.chromium.switch_to.active_element.send_keys(Keys.ESCAPE)


def test_the_field_of_a_question_is_as_high_as_its_text(page: Page) -> None:
    """At each width, also of a window that changes its size while another view is shown."""
    height = "document.querySelector('#question').clientHeight"
    before = page.run(f"return {height}")
    with phone(page, touch=False):
        page.until(f"{height} > 0 && {height} < 60")
        page.show("engine")
    page.show("chat")
    page.until(f"{height} === {before}")
    page.find("#question").send_keys("one", Keys.SHIFT + Keys.ENTER + Keys.NULL, "two")
    page.until(f"{height} > {before}")


def test_enter_sends_an_edit(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "4")
    page.ask("one")
    page.answered(2)
    page.click("#messages .user [aria-label=Edit]")
    area = page.find("#messages .editing textarea")
    area.send_keys(" two", Keys.SHIFT + Keys.ENTER + Keys.NULL, "three")
    assert area.get_property("value") == "one two\nthree"
    area.send_keys(Keys.ENTER)
    page.until("!document.querySelector('#messages .editing')")
    page.answered(2)
    assert page.find("#messages > .user .text").get_property("textContent") == "one two\nthree"
    with phone(page):  # where a finger sends by the button, as for a question
        page.click("#messages .user [aria-label=Edit]")
        area = page.find("#messages .editing textarea")
        area.send_keys(Keys.ENTER, "four")
        assert area.get_property("value") == "one two\nthree\nfour"
        area.send_keys(Keys.ESCAPE)


def test_the_pictures_of_a_question_stay_in_an_edit(page: Page) -> None:
    talk = {"id": "x", "title": "", "changed": 1, "leaf": "b", "since": None}
    question = {"id": "a", "parent": None, "role": "user", "content": "", "pictures": [PICTURE]}
    answer = {"id": "b", "parent": "a", "role": "assistant", "content": "A square."}
    page.run(
        "const { put } = await import('/page/chat/store.js'); await put(given[0]);",
        {**talk, "messages": [question, answer]},
    )
    page.reload()
    page.run(
        """
        window.sent = [];
        const fetched = window.fetch;
        window.fetch = (address, options) => {
            if (!String(address).endsWith("/chat/completions")) return fetched(address, options);
            window.sent.push(JSON.parse(options.body));
            return Promise.reject(new TypeError("not sent"));
        };
        """
    )
    page.click("#messages .user [aria-label=Edit]")
    assert page.find("#messages .editing img").is_displayed()
    page.find("#messages .editing textarea").send_keys(Keys.ENTER)  # a picture alone is a question
    page.until("window.sent.length === 1 && !document.querySelector('#messages .editing')")
    page.click("#messages .user [aria-label=Edit]")
    page.find("#messages .editing textarea").send_keys("What is it?", Keys.ENTER)
    page.until("window.sent.length === 2 && !document.querySelector('#messages .editing')")
    contents: list[Any] = page.run("return window.sent.map(({ messages }) => messages.at(-1).content)")
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    assert contents == [[image], [image, {"type": "text", "text": "What is it?"}]]
    assert page.find("#messages > .user .pictures img").is_displayed()


def columns(page: Page) -> list[str]:
    """The columns of the comparison that are shown."""
    return [column.get_attribute("aria-label") for column in page.all(".column") if column.is_displayed()]


def test_one_model_has_one_column_until_another_is_wanted(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "4")
    page.show("compare")
    assert columns(page) == ["Answer A"]
    page.find("#compare-question").send_keys("What is a list?", Keys.ENTER)
    page.until("document.querySelector('.column .answer .note')?.textContent.startsWith('4 tokens')")
    page.click("#second-column")
    assert columns(page) == ["Answer A", "Answer B"]
    page.click("#second-column")
    assert columns(page) == ["Answer A"]


def alerts(page: Page) -> list[str]:
    """The errors that are shown."""
    return [alert.text for alert in page.all("[role=alert]") if alert.is_displayed()]


def test_an_error_is_said_once(page: Page) -> None:
    """To eyes, and to screen readers, which read alerts out by themselves."""
    page.open_settings()
    page.set("top_p", "7")
    page.ask("What is a set?")
    page.until("document.querySelector('#messages [role=alert]')")
    assert len(alerts(page)) == 1
    assert "top_p" not in page.find("#status").get_property("textContent")
    page.show("compare")
    page.click("#second-column")
    page.find("#compare-question").send_keys("What is a set?", Keys.ENTER)
    page.until("document.querySelector('#compare-problem [role=alert]')")
    assert len(alerts(page)) == 1 and "top_p" in alerts(page)[0]
    page.find("[aria-label='Answer B'] summary").click()
    page.find("[aria-label='Answer B'] [name=top_p]").send_keys("1")
    page.find("[aria-label='Answer B'] [name=max_tokens]").send_keys("4")
    page.find("#compare-question").send_keys(Keys.ENTER)
    page.until(
        "document.querySelector('[aria-label=\"Answer B\"] .note')?.textContent.startsWith('4 tokens')"
    )
    page.until("document.querySelector('[aria-label=\"Answer A\"] [role=alert]')")
    assert len(alerts(page)) == 1
    page.show("chat")
    page.set("top_p", "1")
    page.run("document.querySelector('#question').value = given[0]", "tuple " * 1500)
    page.find("#new-chat").click()
    page.ask("too long")
    page.until("document.querySelector('#messages .offer')")
    assert len(alerts(page)) == 1 and page.all("#messages .error") == []
    assert len(page.refusals()) == 5


def test_names_of_strangers_stand_within_a_sentence(page: Page) -> None:
    result = page.run(
        """
        const { named } = await import("/page/dom.js");
        return given[0].map(named);
        """,
        ["a.json", "b\u202e\u2067txt\n.json", "\U0001f469\u200d\U0001f4bb", "x" * 500],
    )
    assert result == ["a.json", "b txt .json", "\U0001f469\u200d\U0001f4bb", "x" * 99 + "…"]


def test_a_key_with_other_characters_is_no_lost_server(page: Page) -> None:
    page.open_settings()
    field = page.find("#settings [name=key]")
    field.clear()
    field.send_keys("kéy…", Keys.TAB)
    page.until(
        "document.querySelector('#welcome-problem').textContent.includes('characters that no key can have')"
    )
    page.until("document.querySelector('#pulse button')")
    assert page.find("#pulse").get_attribute("class") == "lost"
