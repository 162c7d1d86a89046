"""The page for everyone: screen readers, keyboards, fingers, phones, light and dark.

axe-core judges it, where a package that has it is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium.webdriver.common.keys import Keys

from tests.end_to_end.page.browser import PHONE, Page

VIEWS = ("chat", "compare", "engine")
FINGER = 44  # CSS pixels: WCAG 2.5.5
RICH = """# Sizes

A formula $x^2$, and:

| name | size |
|---|--:|
| a | 1 |

> said

```python
def f(x):  # a comment
    return "text", 12
```

$$\\sum_{i=1}^n i = \\frac{n(n+1)}{2}$$

- one [link](https://example.org)
"""


def axe() -> str | None:
    """The script of axe-core, from a package that has it; None: none is installed."""
    for package in ("axe_playwright_python", "axe_core_python"):
        if (spec := find_spec(package)) is not None:
            for folder in spec.submodule_search_locations or []:
                return (Path(folder) / "axe.min.js").read_text("utf-8")
    return None


@contextmanager
def phone(page: Page, touch: bool = True) -> Iterator[None]:
    """A small screen that fingers touch. touch: whether it says so."""
    page.chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    page.chromium.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})
    try:
        yield
    finally:
        page.chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.chromium.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


@contextmanager
def colours(page: Page, scheme: str) -> Iterator[None]:
    """A user who prefers light or dark."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    try:
        yield
    finally:
        page.chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def fill(page: Page) -> None:
    """A conversation with an answer, its tokens, an error, and everything that text can have."""
    page.open_settings()
    page.set("max_tokens", "4")
    page.run("document.querySelector('[name=probabilities]').click()")
    page.ask("What is a set?")
    page.answered(2)
    page.set("top_p", "7")
    page.ask("And a list?")
    page.until("document.querySelector('#messages [role=alert]')")
    page.run(
        """
        const { show } = await import("/page/text/markdown.js");
        show(document.querySelector("#messages > .assistant .text"), given[0]);
        document.querySelector("#messages [aria-label='Show tokens']").click();
        document.querySelector(".text-tokens .token").focus();
        """,
        RICH,
    )
    page.set("top_p", "1")
    page.refusals()


def violations(page: Page) -> list[str]:
    """What axe-core finds on the page as it is."""
    found: Any = page.run(
        """
        const { violations } = await axe.run(document, { resultTypes: ["violations"] });
        return violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`));
        """
    )
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, scheme: str) -> None:
    script = axe()
    if script is None:
        pytest.skip("axe-core is not installed (pip install axe-core-python)")
    with colours(page, scheme):
        fill(page)
        page.chromium.execute_script(script)
        assert violations(page) == []
        for view in VIEWS[1:]:
            page.show(view)
            page.until(f"!document.querySelector('#{view}').hidden")
            assert violations(page) == []
        page.show("chat")
        with phone(page):
            assert violations(page) == []
            page.find("#open-history").click()
            assert violations(page) == []
            page.chromium.switch_to.active_element.send_keys(Keys.ESCAPE)
            page.find("#open-settings").click()
            assert violations(page) == []
            page.chromium.switch_to.active_element.send_keys(Keys.ESCAPE)


def outside(page: Page) -> list[str]:
    """What lies beside the window. The page itself never scrolls, only its parts do."""
    found: Any = page.run(
        """
        const scrolls = (node) => node.closest("pre, .wide-table, .formula");
        const { clientWidth: width, clientHeight: height, scrollHeight } = document.scrollingElement;
        const beside = [...document.querySelectorAll("body *")].filter((node) => {
            const box = node.getBoundingClientRect();
            return !scrolls(node) && box.width > 1 && (box.left < -1 || box.right > width + 1);
        });
        const told = beside.map((node) => node.outerHTML.slice(0, 80));
        return scrollHeight > height ? [...told, "the page scrolls"] : told;
        """
    )
    return found


def test_nothing_lies_outside_a_phone(page: Page) -> None:
    fill(page)
    with phone(page):
        assert page.run("return document.scrollingElement.clientWidth") == PHONE["width"]
        for view in VIEWS:
            page.show(view)
            assert outside(page) == []
        for name in ("settings", "history"):
            page.show("chat")
            page.find(f"#open-{name}").click()
            assert page.run("return document.querySelector(given[0]).matches(':modal')", f"#{name}")
            page.chromium.switch_to.active_element.send_keys(Keys.ESCAPE)
            page.until(f"!document.querySelector('#{name}').open")


@pytest.mark.parametrize("touch", [True, False])
def test_fingers_find_every_control(page: Page, touch: bool) -> None:
    """Each control is 44 px wide and high. Links in text and the words of the token view are lines of text."""
    fill(page)
    with phone(page, touch):
        assert page.run("return matchMedia('(pointer: coarse)').matches") is touch
        for view in VIEWS:
            page.show(view)
            for dialog in (None, "settings", "history") if view == "chat" else (None,):
                if dialog:
                    page.find(f"#open-{dialog}").click()
                small = page.run(
                    """
                    const controls = "button, a, input, select, textarea, summary";
                    const exempt = ".text a, .text-tokens .token, .check input";
                    return [...document.querySelectorAll(controls)].filter((node) => {
                        const box = node.getBoundingClientRect();
                        if (!node.checkVisibility() || node.matches(exempt)) return false;
                        return box.height < given[0] - 0.5 || box.width < given[0] - 0.5;
                    }).map((node) => `${node.outerHTML.slice(0, 90)} ${node.getBoundingClientRect().width}x` +
                        node.getBoundingClientRect().height);
                    """,
                    FINGER,
                )
                assert small == []
                if dialog:
                    page.chromium.switch_to.active_element.send_keys(Keys.ESCAPE)


def test_the_keyboard_reaches_everything(page: Page) -> None:
    """From the first control on, the tab key comes by all of a conversation's controls, and the focus is seen."""
    page.open_settings()
    page.set("max_tokens", "4")
    page.ask("What is a set?")
    page.answered(2)
    page.run("document.activeElement.blur(); document.querySelector('#open-history').focus()")
    reached = []
    for _ in range(120):
        focused = page.chromium.switch_to.active_element
        name = page.run(
            """
            const [node] = given;
            const outlined = getComputedStyle(node).outlineStyle !== "none";
            const name = node.id || node.ariaLabel || node.name || node.textContent.slice(0, 30);
            return [name, Boolean(outlined || node.closest(".box:focus-within, #scroll, #engine"))];
            """,
            focused,
        )
        if focused.tag_name == "body":
            break
        reached.append(name)
        focused.send_keys(Keys.TAB)
    names = [name for name, _ in reached]
    assert [name for name, seen in reached if not seen] == []
    for wanted in (
        "search",
        "question",
        "Edit",
        "Copy",
        "Generate again",
        "Show tokens",
        "new-chat",
        "temperature",
    ):
        assert wanted in names, names


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_controls_have_names(page: Page, scheme: str) -> None:
    with colours(page, scheme):
        fill(page)
        tree = page.chromium.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        controls = ("button", "textbox", "combobox", "spinbutton", "link", "MenuListPopup")
        shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in controls[:-1]]
        assert len(shown) > 15
        assert [node for node in shown if not node.get("name", {}).get("value")] == []
        # WCAG 2: a ratio of luminances of 4.5 or more between text and what lies behind it.
        faint = page.run(
            """
            const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
            const over = (colour, [r, g, b]) => {
                canvas.fillStyle = `rgb(${r} ${g} ${b})`;
                canvas.fillRect(0, 0, 1, 1);
                canvas.fillStyle = colour;
                canvas.fillRect(0, 0, 1, 1);
                return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
            };
            const light = (rgb) => rgb.map((c) => c / 255)
                .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
            const behind = (node) => {
                const below = node.parentElement ? behind(node.parentElement) : [255, 255, 255];
                return over(getComputedStyle(node).backgroundColor, below);
            };
            const weak = [];
            for (const node of document.querySelectorAll("body *")) {
                const written = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
                const how = { opacityProperty: true, visibilityProperty: true };
                if (!written || !node.checkVisibility(how)) continue;
                const back = behind(node);
                const both = [light(over(getComputedStyle(node).color, back)), light(back)];
                const ratio = (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
                if (ratio < 4.5) weak.push(`${node.outerHTML.slice(0, 60)} ${ratio}`);
            }
            return weak;
            """
        )
        assert faint == []
