"""The view of the engine."""

from __future__ import annotations

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.action_chains import ActionChains

from tests.end_to_end.page.browser import KEY, Page


def test_the_figures_of_the_engine_move(page: Page) -> None:
    page.open_settings()
    page.show("engine")
    finished = "[...document.querySelectorAll('.card')].find((c) => c.textContent.includes('finished'))"
    before = int(page.until(f"{finished}.querySelector('dd').textContent.match(/^\\d+$/)?.[0]"))
    page.show("chat")
    page.set("max_tokens", "400")
    page.ask("What is the for statement?")
    page.answered()
    page.show("engine")
    assert page.until(f"Number({finished}.querySelector('dd').textContent) > {before}")
    titles = [title.text for title in page.all(".card h2")]
    assert len(titles) == 11
    for title in ("Tokens per second", "Time to first token"):
        card = f"[...document.querySelectorAll('.card')].find((c) => c.textContent.startsWith('{title}'))"
        assert page.until(f"{card}.querySelector('path.line').getAttribute('d').includes('L')")
        assert page.until(f"{card}.querySelector('.peak').textContent.match(/\\d/)")
    chart = page.find(".card .plot svg")
    quarter = chart.size["width"] // 4
    ActionChains(page.chromium).move_to_element_with_offset(chart, quarter, 0).perform()
    assert abs(int(page.find(".card .peak").text.removesuffix(" s ago")) - 45) <= 1  # of three minutes


def test_the_engine_is_told_and_drawn(page: Page) -> None:
    page.open_settings()
    page.write_much(900)
    page.ask("What is the for statement?")
    page.until("document.querySelector('#messages .assistant .text')?.textContent")
    page.show("engine")
    page.until("document.querySelectorAll('#blocks .used').length > 0")
    page.until("document.querySelector('#queue-legend').textContent.includes('1 writing')")
    page.until("document.querySelectorAll('#queue i.decode').length === 1")
    facts = dict(
        page.run(
            """
            const rows = [...document.querySelectorAll('#facts div')];
            return rows.map((row) => [...row.children].map((cell) => cell.textContent));
            """
        )
    )
    assert facts["Model"] == "demo" and facts["Context"] == "1,024 tokens"
    assert facts["Device"].startswith("cpu") and facts["Computes in"] == "float32"
    assert facts["Weights"].startswith("4.0M, ") and facts["KV cache"] == "67.1 MB, 4.1 kB a token"
    assert len(page.all("#blocks rect")) == 1024
    page.show("chat")
    page.find("#stop").click()
    page.answered()
    page.show("engine")
    assert page.until("document.querySelectorAll('#blocks .used').length === 0 && true")
    row = page.find("#timeline-rows li")
    assert "demo · stopped" in row.text
    stages = [part.get_attribute("class") for part in page.all("#timeline-rows li:first-child .bar i")]
    assert stages[-1] == "stage-stream" and "stage-prefill" in stages
    assert page.find("#timeline-scale span:last-child").text.endswith("s")


def test_scales_end_with_round_numbers(page: Page) -> None:
    ends = page.run(
        """
        const { roundUp } = await import("/page/engine/chart.js");
        const values = [0, 0.003, 0.2, 1, 1.01, 7, 49, 51, 1000, 1001];
        return [...values.map((value) => roundUp(value)), roundUp(3, true)];
        """
    )
    assert ends == pytest.approx([1, 0.005, 0.2, 1, 2, 10, 50, 100, 1000, 2000, 4])


def test_without_a_key_the_page_leads_to_the_field(page: Page) -> None:
    page.chromium.execute_script("sessionStorage.clear()")
    page.chromium.refresh()
    page.until("document.querySelector('#welcome-problem button')")
    page.until("document.querySelector('#pulse button')")
    page.find("#pulse button").click()
    field = page.chromium.switch_to.active_element
    assert field.get_attribute("name") == "key"
    field.send_keys(KEY, "\t")
    page.until("document.querySelector('#welcome-model').textContent === 'demo'")
    page.until("document.querySelector('#pulse-text').textContent === 'idle'")
    assert page.refusals() != []
