"""Asking, stopping, trying again, and errors: the page in a real browser, on a real server."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.keys import Keys

from tests.end_to_end.page.browser import KEY, Page


def test_an_answer_streams_in_and_is_announced(page: Page) -> None:
    page.open_settings()
    page.write_much(120)
    # Each change of the answer's text is written down: it comes in pieces, and each one goes on from the last.
    page.chromium.execute_script(
        """
        window.seen = [];
        new MutationObserver(() => {
            const text = document.querySelector("#messages > li:last-child.assistant .text")?.textContent ?? "";
            if (text && text !== seen.at(-1)) seen.push(text);
        }).observe(document.querySelector("#messages"), { childList: true, subtree: true, characterData: true });
        """
    )
    page.ask("What is the with statement?")
    page.answered()
    seen = page.chromium.execute_script("return seen")
    assert len(seen) > 2
    words = [
        "".join(filter(str.isalnum, text)) for text in seen
    ]  # marks of Markdown go when they are complete
    assert all(after.startswith(before) for before, after in pairwise(words))
    note = page.find("#messages > li:last-child .note").text
    assert "120 tokens" in note and "cut off" in note
    assert page.find("#welcome").is_displayed() is False
    roles = [item.get_attribute("class") for item in page.all("#messages > li")]
    assert roles == ["user", "assistant"]
    page.chromium.refresh()
    page.until("document.querySelectorAll('#messages > li').length == 2")
    assert page.find("#messages > li:last-child .text").get_property("textContent") == seen[-1]


def test_stop_ends_the_answer_and_frees_the_engine(page: Page) -> None:
    page.open_settings()
    page.write_much(900)
    page.chromium.execute_script(
        """
        const log = document.querySelector("#messages");
        new MutationObserver((_, observer) => {
            if (!log.querySelector(".assistant .text")?.textContent) return;
            observer.disconnect();
            document.querySelector("#stop").click();
        }).observe(log, { childList: true, subtree: true });
        """
    )
    page.ask("Explain list comprehensions")
    text = page.answered()
    assert text
    assert page.find("#messages > li:last-child .note").text == "Stopped"
    assert page.find("#send").is_displayed() and not page.find("#stop").is_displayed()
    page.until("document.querySelector('#pulse-text').textContent === 'idle'")
    page.ask("And set comprehensions?")  # the conversation goes on
    page.until("document.querySelectorAll('#messages > li').length == 4")
    page.find("#question").send_keys(Keys.ESCAPE)
    page.answered()


def test_a_setting_changes_the_answer_and_a_retry_repeats_it(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "1")
    page.ask("What is a tuple?")
    page.answered()
    assert page.find("#messages > li:last-child .note").text.startswith("1 token ·")
    page.set("max_tokens", "9")
    page.again()
    page.until(
        "document.querySelector('#messages > li:last-child .note')?.textContent.startsWith('9 tokens')"
    )
    first = page.answered()
    page.find("#messages > li:first-child [aria-label=Edit]").click()
    editor = page.find("#messages .editing textarea")
    assert editor == page.chromium.switch_to.active_element
    assert editor.get_property("value") == "What is a tuple?"
    editor.clear()
    editor.send_keys("What is the for statement?")
    page.find("#messages .editing .strong").click()
    page.until("document.querySelector('#messages > li.user .text')?.textContent.includes('for statement')")
    assert page.answered() != first
    assert len(page.all("#messages > li")) == 2
    page.find("#new-chat").click()
    assert page.all("#messages > li") == [] and page.find("#welcome").is_displayed()


def test_what_the_server_refuses_is_shown_plainly(page: Page) -> None:
    page.open_settings()
    page.set("top_p", "7")
    page.ask("What is a list?")
    error = page.until("document.querySelector('#messages [role=alert]')?.textContent")
    assert "top_p" in error and "(400)" in error
    page.set("top_p", "0.9")
    page.set("key", "another")
    page.again()
    error = page.until(
        "document.querySelector('#messages [role=alert]')?.textContent.match(/.*API key.*/)?.[0]"
    )
    assert "(401)" in error
    page.set("key", KEY)
    page.set("max_tokens", "4")
    page.again()
    page.answered()
    assert page.all("#messages [role=alert]") == []
    # The browser itself writes refused calls to the console.
    refusals = [entry["message"] for entry in page.chromium.get_log("browser")]
    assert all("status of 4" in message for message in refusals)
