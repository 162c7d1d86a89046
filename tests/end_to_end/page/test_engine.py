"""The view of the engine."""

from __future__ import annotations

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.end_to_end.page.browser import PHONE, Page


def test_the_figures_of_the_engine_move(page: Page) -> None:
    page.open_settings()
    page.find("nav a[href='#engine']").click()
    finished = "[...document.querySelectorAll('.card')].find((c) => c.textContent.includes('finished'))"
    before = int(page.until(f"{finished}.querySelector('dd').textContent.match(/^\\d+$/)?.[0]"))
    page.find("nav a[href='#chat']").click()
    page.set("max_tokens", "400")
    page.ask("What is the for statement?")
    page.answered()
    page.find("nav a[href='#engine']").click()
    assert page.until(f"Number({finished}.querySelector('dd').textContent) > {before}")
    titles = [title.text for title in page.all(".card h2")]
    assert len(titles) == 8
    for title in ("Tokens per second", "Time to first token"):
        card = f"[...document.querySelectorAll('.card')].find((c) => c.textContent.startsWith('{title}'))"
        assert page.until(f"{card}.querySelector('path.line').getAttribute('d').includes('L')")
        assert page.until(f"{card}.querySelector('.peak').textContent.match(/\\d/)")
    chart = page.find(".card > svg")
    quarter = chart.size["width"] // 4
    ActionChains(page.chromium).move_to_element_with_offset(chart, quarter, 0).perform()
    assert abs(int(page.find(".card .peak").text.removesuffix(" s ago")) - 45) <= 1  # of three minutes
    page.find("nav a[href='#chat']").click()


def test_nothing_lies_outside_a_phone(page: Page) -> None:
    page.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    try:
        for view in ("chat", "engine"):
            page.find(f"nav a[href='#{view}']").click()
            wide = page.run(
                """
                return [...document.querySelectorAll("body *")].filter((node) => {
                    const box = node.getBoundingClientRect();
                    return box.width > 1 && (box.left < -1 || box.right > innerWidth + 1);
                }).map((node) => node.outerHTML.slice(0, 80));
                """
            )
            assert wide == []
        page.find("#open-settings").click()
        assert page.run("return document.querySelector('#settings').matches(':modal')")
        page.chromium.switch_to.active_element.send_keys(Keys.ESCAPE)
        page.until("!document.querySelector('#settings').open")
    finally:
        page.chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_controls_have_names(page: Page, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    page.open_settings()
    page.set("max_tokens", "4")
    page.ask("What is a set?")
    page.answered()
    tree = page.chromium.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = ("button", "textbox", "combobox", "spinbutton", "link", "MenuListPopup")
    shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in controls[:-1]]
    assert len(shown) > 15
    assert [node for node in shown if not node.get("name", {}).get("value")] == []
    # WCAG 2: a ratio of luminances of 4.5 or more between text and what lies behind it.
    faint = page.run(
        """
        const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
        const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
        const behind = (node) => {
            for (; node; node = node.parentElement) {
                const [r, g, b, a = 1] = numbers(getComputedStyle(node).backgroundColor);
                if (a === 1 || !node.parentElement) return [r, g, b];
            }
        };
        const weak = [];
        for (const node of document.querySelectorAll("body *")) {
            const written = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
            if (!written || !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
            const both = [light(numbers(getComputedStyle(node).color)), light(behind(node))];
            const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
            if (ratio < 4.5) weak.push(`${node.outerHTML.slice(0, 60)} ${ratio}`);
        }
        return weak;
        """
    )
    page.chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert faint == []


