"""Conversations: kept, listed, searched, renamed, deleted, exported, branched; a full context; calls and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.keys import Keys

from tests.end_to_end.page.browser import Page

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Rome", "Oslo"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def titles(page: Page) -> list[str]:
    return [title.get_property("textContent") for title in page.all("#conversations .open span")]


def shown(page: Page) -> list[str]:
    """The texts of the questions in view."""
    return [text.get_property("textContent") for text in page.all("#messages > .user .text")]


def downloaded(page: Page, click: str) -> tuple[str, str]:
    """Name and text of the file that a click saves."""
    page.chromium.execute_script(
        """
        window.files = [];
        const made = URL.createObjectURL;
        URL.createObjectURL = (blob) => { blob.text().then((text) => (window.text = text)); return made(blob); };
        const click = HTMLAnchorElement.prototype.click;
        HTMLAnchorElement.prototype.click = function () { window.files.push(this.download); };
        """
    )
    page.run("document.querySelector(given[0]).click()", click)
    return page.until("window.text !== undefined && [window.files[0], window.text]")


def ask_two(page: Page) -> None:
    """Two conversations of one question each."""
    page.open_settings()
    page.set("max_tokens", "8")
    for question in ("What is a tuple?", "How do sets work?"):
        page.find("#new-chat").click()
        page.ask(question)
        page.answered(2)


def test_a_new_chat_loses_nothing(page: Page) -> None:
    ask_two(page)
    assert titles(page) == ["How do sets work?", "What is a tuple?"]
    page.reload()
    assert titles(page) == ["How do sets work?", "What is a tuple?"]
    assert shown(page) == ["How do sets work?"]
    page.find("#conversations li:last-child .open").click()
    assert shown(page) == ["What is a tuple?"]
    current = page.find("#conversations [aria-current]")
    assert "What is a tuple?" in current.get_property("textContent")


def test_an_answer_goes_on_behind_a_new_chat(page: Page) -> None:
    page.open_settings()
    page.write_much(400)
    page.ask("What is a list?")
    page.until("document.querySelector('#messages .assistant .text')?.textContent")
    page.find("#new-chat").click()
    assert shown(page) == []
    page.until("document.querySelector('#notice')?.textContent.includes('An answer is ready')")
    page.click("#notice .plain")
    assert shown(page) == ["What is a list?"]
    assert "tokens" in page.find("#messages > li:last-child .note").text


def test_search_rename_delete_and_undo(page: Page) -> None:
    ask_two(page)
    page.find("#search").send_keys("TUPLE what")
    assert titles(page) == ["What is a tuple?"]
    page.find("#search").clear()
    page.find("#search").send_keys("nowhere", Keys.BACKSPACE)
    page.until("document.querySelector('#none-found').textContent === 'Nothing found.'")
    page.run("document.querySelector('#search').value = ''")
    page.find("#search").send_keys("x", Keys.BACKSPACE)
    page.run("document.querySelector('[aria-label=\"Rename What is a tuple?\"]').click()")
    page.chromium.switch_to.active_element.send_keys("Tuples", Keys.ENTER)
    assert "Tuples" in titles(page)
    page.run("document.querySelector('[aria-label=\"Delete Tuples\"]').click()")
    page.until("document.querySelector('#notice').textContent.includes('Deleted')")
    assert titles(page) == ["How do sets work?"]
    page.click("#notice .plain")
    page.until("document.querySelectorAll('#conversations li').length === 2")
    assert shown(page) == ["What is a tuple?"]
    page.run("document.querySelector('[aria-label=\"Delete Tuples\"]').click()")
    page.until("document.querySelector('#notice').textContent.includes('Deleted')")
    assert shown(page) == [] and page.find("#welcome").is_displayed()
    page.reload()
    assert titles(page) == ["How do sets work?"]


def test_export_and_import(page: Page, tmp_path: Path) -> None:
    ask_two(page)
    name, text = downloaded(page, "[aria-label='Export How do sets work?']")
    assert name == "How do sets work.md"
    assert text.startswith("# How do sets work?\n\n## You\n\nHow do sets work?\n\n## Answer of demo\n\n")
    page.run("window.text = undefined")
    name, text = downloaded(page, "#export-all")
    assert [record["leaf"] is not None for record in json.loads(text)] == [True, True]
    file = tmp_path / "kept.json"
    file.write_text(json.dumps([*json.loads(text)[:1], {"messages": "none"}]))
    page.find("#import-file").send_keys(str(file))
    page.until("document.querySelectorAll('#conversations li').length === 3")
    page.until(
        "document.querySelector('#notice').textContent.includes('1 was not (conversation 2: messages')"
    )


def test_other_tabs_see_it(page: Page) -> None:
    ask_two(page)
    driver = page.chromium
    first, address = driver.current_window_handle, driver.current_url
    key = driver.execute_script("return sessionStorage.getItem('pagewire.key')")
    driver.switch_to.new_window("tab")
    try:
        driver.get(address)
        driver.execute_script("sessionStorage.setItem('pagewire.key', arguments[0])", key)
        page.reload()
        page.refusals()  # of the visit without the key
        assert titles(page) == ["How do sets work?", "What is a tuple?"]
        page.run("document.querySelector('[aria-label=\"Delete What is a tuple?\"]').click()")
        page.until("document.querySelectorAll('#conversations li').length === 1")
    finally:
        driver.close()
        driver.switch_to.window(first)
    page.until("document.querySelectorAll('#conversations li').length === 1")


def test_edits_and_retries_are_branches(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "6")
    page.ask("What is a tuple?")
    page.answered(2)
    page.set("max_tokens", "7")
    page.again()
    page.until(
        "document.querySelector('#messages > li:last-child .note')?.textContent.startsWith('7 tokens')"
    )
    assert "2 of 2" in page.find("#messages > li:last-child .versions").text
    page.click("#messages > li:last-child [aria-label='Previous version']")
    assert page.find("#messages > li:last-child .note").text.startswith("6 tokens")
    page.click("#messages > li:first-child [aria-label=Edit]")
    page.find("#messages .editing textarea").send_keys(" And a list?")
    page.find("#messages .editing .strong").click()
    page.until("document.querySelector('#messages .user .text')?.textContent.includes('And a list?')")
    page.answered(2)
    page.click("#messages > li:first-child [aria-label='Previous version']")
    assert shown(page) == ["What is a tuple?"]
    page.click("#messages > li:last-child [aria-label='Branch into a new chat']")
    page.until("document.querySelectorAll('#conversations li').length === 2")
    assert titles(page)[0] == "What is a tuple? (branch)" and shown(page) == ["What is a tuple?"]
    page.click("#messages > li:last-child .actions > .quiet:not([aria-label])")  # Continue
    page.until("document.querySelector('#messages > li:last-child:not([aria-busy]) .note')?.textContent")


def test_a_full_context_offers_what_to_do(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "4")
    many = "tuple " * 600
    page.run("document.querySelector('#question').value = given[0]", many)
    page.ask("one")
    page.answered(2)
    assert "of 1,024 tokens" in page.find("#room").text
    page.run("document.querySelector('#question').value = given[0]", many)
    page.ask("two")
    page.until("document.querySelector('#messages .offer')")
    assert "(400)" in page.find("#messages [role=alert]").text
    page.click("#messages .offer .strong")
    page.until("!document.querySelector('#messages .offer')")
    page.answered(4)
    assert "tokens" in page.find("#messages > li:last-child .note").text
    assert len(page.all("#messages > .skipped")) == 2
    page.run("document.querySelector('#question').value = given[0]", "tuple " * 1500)
    page.ask("three")  # too long alone
    page.until("document.querySelector('#messages .offer')")
    page.click("#messages .offer .strong")
    page.until("document.querySelector('#notice').textContent.includes('alone fills the context')")
    page.click("#messages .offer button:last-child")
    assert page.find("#messages .editing textarea").get_property("value").endswith("three")
    assert len(page.refusals()) == 2


def test_calls_and_their_results(page: Page) -> None:
    page.open_settings()
    page.run("document.querySelector('[name=tools]').value = given[0]", json.dumps([WEATHER]))
    page.set("max_tokens", "60")
    page.ask("What is the weather?")
    page.answered(2)
    assert page.find("#messages .call h3").text == "Call of weather"
    arguments = json.loads(page.find("#messages .call pre").get_property("textContent"))
    assert arguments["town"] in ("Rome", "Oslo")
    page.find("#messages .editing textarea").send_keys('{"degrees": 7}')
    page.set("max_tokens", "8")
    page.click("#messages .editing .strong")
    page.answered(4)
    assert '"degrees": 7' in page.find("#messages > .tool pre").get_property("textContent")
    assert page.all("#messages > li:last-child .call") == []


def test_structured_output_is_shown_as_json(page: Page) -> None:
    page.open_settings()
    page.run("document.querySelector('[name=schema]').value = given[0]", json.dumps(SCHEMA))
    page.ask("Is it so?")
    page.answered(2)
    code = page.find("#messages > li:last-child pre").get_property("textContent")
    assert set(json.loads(code)) == {"ok"} and "\n" in code
    page.run("document.querySelector('[name=schema]').value = '{'")
    page.ask("Again?")
    error = page.until("document.querySelector('#messages [role=alert]')?.textContent")
    assert "JSON schema in the settings" in error


def test_tokens_have_probabilities_and_alternatives(page: Page) -> None:
    page.open_settings()
    page.set("max_tokens", "12")
    page.ask("What is a tuple?")
    page.answered(2)
    page.click("#messages > li:last-child [aria-label='Show tokens']")
    assert "without probabilities" in page.find("#messages .tokens").text
    page.click("#messages .tokens .plain")
    page.until("document.querySelector('#messages .versions')")
    text = page.answered(2)
    page.click("#messages > li:last-child [aria-label='Show tokens']")
    tokens = page.all("#messages .text-tokens .token")
    assert len(tokens) == 12
    assert "".join(token.get_property("textContent") for token in tokens).split() == text.split()
    assert "12 tokens · perplexity" in page.find("#messages .legend").text
    page.run("document.querySelector('.text-tokens .token').focus()")
    page.chromium.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert page.find(".detail p").text.startswith("Token 2:")
    shares = [row.text for row in page.all(".detail tr td:last-child")]
    assert len(shares) == 5 and all(share.endswith("%") for share in shares)
    taken = page.find(".detail .taken td:last-child").text
    assert float(taken.rstrip("%")) == max(float(share.strip("<%")) for share in shares)  # greedy


def test_two_settings_side_by_side(page: Page) -> None:
    page.open_settings()
    page.show("compare")
    page.click("#second-column")
    for letter, number in (("A", "3"), ("B", "9")):
        page.click(f"[aria-label='Answer {letter}'] summary")
        page.find(f"[aria-label='Answer {letter}'] [name=max_tokens]").send_keys(number)
    page.find("#compare-question").send_keys("What is a tuple?", Keys.ENTER)
    notes = page.until(
        """(() => {
            const notes = [...document.querySelectorAll('.column .answer .note')].map((note) => note.textContent);
            return notes.length === 2 && notes.every(Boolean) && notes;
        })()"""
    )
    assert notes[0].startswith("3 tokens") and notes[1].startswith("9 tokens")
    texts = [answer.text for answer in page.all(".column .text")]
    assert texts[1].startswith(texts[0])  # both are greedy
    page.click("[aria-label='Answer A'] .row .quiet:last-child")
    assert len(page.all(".column .text-tokens .token")) == 3
    page.click("[aria-label='Answer A'] .row .quiet:last-child")
    assert page.all(".column .text-tokens") == []
