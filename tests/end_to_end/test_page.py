"""The page in a real browser, on a real server: Chromium by Selenium, where both are installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("selenium", reason="the page is tested through Selenium, which is not installed")

from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver here (on Debian: apt install chromium chromium-driver)",
)

KEY = "a-key-for-the-page"
SECONDS = 60.0  # until a test gives up
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


@pytest.fixture(scope="module")
def url(address: str) -> Iterator[str]:
    """A server that needs a key."""
    command = [sys.executable, "-m", "pagewire.cli.main", "serve", "--attach", address]
    process = subprocess.Popen(
        [*command, "--port", "0"],
        env={**os.environ, "PAGEWIRE_API_KEY": KEY},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    word, _, url = process.stdout.readline().strip().partition(" ")
    assert word == "ready"
    yield url
    process.terminate()
    process.stdout.close()
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def chromium() -> Iterator[webdriver.Chrome]:
    """One browser for all tests."""
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800"):
        options.add_argument(argument)
    options.binary_location = CHROMIUM or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(SECONDS)
    yield driver
    driver.quit()


class Page:
    """The page, as a user has it before them."""

    def __init__(self, chromium: webdriver.Chrome) -> None:
        self.chromium = chromium

    def find(self, selector: str) -> WebElement:
        return self.chromium.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.chromium.find_elements(By.CSS_SELECTOR, selector)

    def until(self, script: str) -> Any:
        """Wait until an expression of JavaScript is true; its value."""
        wait = WebDriverWait(self.chromium, SECONDS, poll_frequency=0.05)
        return wait.until(lambda driver: driver.execute_script(f"return {script}"), script)

    def run(self, body: str, *arguments: Any) -> Any:
        """What a function body of JavaScript, which may await, returns."""
        wrapped = f"""
            const done = arguments[arguments.length - 1];
            (async (...given) => {{ {body} }})(...arguments).then(done, (error) => done(`${{error}}`));
        """
        return self.chromium.execute_async_script(wrapped, *arguments)

    def ask(self, text: str) -> None:
        self.find("#question").send_keys(text, Keys.ENTER)

    def answered(self) -> str:
        """Wait for the end of the answer; its text."""
        self.until("document.querySelector('#messages > li:last-child:not([aria-busy]) .note')?.textContent")
        return self.find("#messages > li:last-child .text").text

    def set(self, name: str, value: str) -> None:
        field = self.find(f"#settings [name={name}]")
        field.clear()
        field.send_keys(value, Keys.TAB)


@pytest.fixture
def page(chromium: webdriver.Chrome, url: str) -> Iterator[Page]:
    """The page at its first visit, with the key given; afterwards, nothing was wrong in the console."""
    chromium.get(url)
    chromium.execute_script("localStorage.clear(); sessionStorage.setItem('pagewire.key', arguments[0])", KEY)
    chromium.get(url + "/#chat")
    chromium.refresh()
    page = Page(chromium)
    page.until("document.querySelector('#settings [name=model]').value")
    chromium.get_log("browser")  # of the visit without a key
    yield page
    assert chromium.get_log("browser") == []


def open_settings(page: Page) -> None:
    page.find("#open-settings").click()
    page.until("document.querySelector('#settings').open")
    page.set("temperature", "0")


def write_much(page: Page, tokens: int) -> None:
    """Have answers of so many tokens. The demo model ends most of its own before anybody could see them come:
    a field that the page has not prevents that.
    """
    page.set("max_tokens", str(tokens))
    page.run(
        """
        const more = Object.assign(document.createElement("input"), { name: "min_tokens", type: "number" });
        more.value = given[0];
        document.querySelector("#settings-form").append(more);
        """,
        tokens,
    )


def test_an_answer_streams_in_and_is_announced(page: Page) -> None:
    open_settings(page)
    write_much(page, 120)
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
    open_settings(page)
    write_much(page, 900)
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
    open_settings(page)
    page.set("max_tokens", "1")
    page.ask("What is a tuple?")
    page.answered()
    assert page.find("#messages > li:last-child .note").text.startswith("1 token ·")
    page.set("max_tokens", "9")
    page.find("#messages > li:last-child [aria-label='Generate again']").click()
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
    open_settings(page)
    page.set("top_p", "7")
    page.ask("What is a list?")
    error = page.until("document.querySelector('#messages [role=alert]')?.textContent")
    assert "top_p" in error and "(400)" in error
    page.set("top_p", "0.9")
    page.set("key", "another")
    page.find("#messages > li:last-child [aria-label='Generate again']").click()
    error = page.until(
        "document.querySelector('#messages [role=alert]')?.textContent.match(/.*API key.*/)?.[0]"
    )
    assert "(401)" in error
    page.set("key", KEY)
    page.set("max_tokens", "4")
    page.find("#messages > li:last-child [aria-label='Generate again']").click()
    page.answered()
    assert page.all("#messages [role=alert]") == []
    # The browser itself writes refused calls to the console.
    refusals = [entry["message"] for entry in page.chromium.get_log("browser")]
    assert all("status of 4" in message for message in refusals)


def test_the_figures_of_the_engine_move(page: Page) -> None:
    open_settings(page)
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
    open_settings(page)
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


# ---------------------------------------------------------------- the parts of the scripts that are pure


def test_events_are_the_same_however_they_are_cut(page: Page) -> None:
    result = page.run(
        """
        const { EventParser } = await import("/page/sse.js");
        const text = ": hello\\r\\ndata: {\\"a\\": 1}\\r\\n\\r\\nevent: x\\rdata:one\\rdata: two\\r\\r" +
            "id: 3\\n\\ndata\\n\\ndata: é€😀\\n\\ndata: [DONE]\\n\\ndata: never ended";
        const pieces = (size) => {
            const parser = new EventParser();
            const events = [];
            for (let at = 0; at < text.length; at += size) events.push(...parser.feed(text.slice(at, at + size)));
            return JSON.stringify(events);
        };
        return [...Array(text.length).keys()].map((n) => pieces(n + 1));
        """
    )
    assert len(set(result)) == 1
    assert [(event["event"], event["data"]) for event in json.loads(result[0])] == [
        ("message", '{"a": 1}'),
        ("x", "one\ntwo"),
        ("message", ""),
        ("message", "é€😀"),
        ("message", "[DONE]"),
    ]


def test_metrics_are_read_and_counted(page: Page) -> None:
    result = page.run(
        """
        const { History, parse, quantile, read } = await import("/page/metrics.js");
        const scrape = (tokens, fast, slow) => `# HELP vllm:x A comment.
vllm:num_requests_running{model_name="a",engine="0"} 2.0
vllm:num_requests_running{model_name="a",engine="1"} 3.0
vllm:generation_tokens_total{model_name="a \\\\"quoted\\\\" {name}"} ${tokens}
vllm:gpu_cache_usage_perc 0.25
vllm:prefix_cache_queries_total ${2 * tokens}
vllm:prefix_cache_hits_total ${tokens}
vllm:time_to_first_token_seconds_bucket{le="0.1"} ${fast}
vllm:time_to_first_token_seconds_bucket{le="1.0"} ${fast + slow}
vllm:time_to_first_token_seconds_bucket{le="+Inf"} ${fast + slow}
`;
        const history = new History(60);
        history.push(read(scrape(1000, 50, 50)), 10);
        history.push(read(scrape(1300, 60, 50)), 12);
        const last = (points) => points.at(-1)[1];
        const before = [last(history.rate("generated")), last(history.share("hits", "queries")),
            last(history.quantile("ttft", 0.5)), last(history.gauge("running")), last(history.gauge("kv"))];
        history.push(read(scrape(5, 1, 0)), 13); // the core began anew
        return {
            before,
            anew: history.scrapes.length,
            label: parse(scrape(1, 1, 1)).get("vllm:generation_tokens_total")[0].labels.model_name,
            missing: history.last.waiting ?? null,
            quantiles: [0, 0.25, 0.5, 0.95, 1].map((q) => quantile([[1, 10], [2, 20], [Infinity, 20]], q)),
            beyond: quantile([[1, 0], [Infinity, 5]], 0.5),
            nothing: Number.isNaN(quantile([], 0.5)) && Number.isNaN(quantile([[1, 0]], 0.5)),
        };
        """
    )
    assert result["before"] == [150, 0.5, pytest.approx(0.05), 5, 0.25]
    assert result["anew"] == 1
    assert result["label"] == 'a "quoted" {name}'
    assert result["missing"] is None
    assert result["quantiles"] == [0, 0.5, 1, 1.9, 2]
    assert result["beyond"] == 1
    assert result["nothing"] is True


def test_markdown_makes_few_elements_and_no_others(page: Page) -> None:
    result = page.run(
        """
        const { show } = await import("/page/markdown.js");
        const text = given[0];
        const [whole, grown] = [document.createElement("div"), document.createElement("div")];
        show(whole, text);
        for (let end = 1; end <= text.length; end += 1) show(grown, text.slice(0, end));
        const tags = new Set([...whole.querySelectorAll("*")].map((node) => node.localName));
        return {
            same: whole.innerHTML === grown.innerHTML,
            tags: [...tags].sort(),
            links: [...whole.querySelectorAll("a")].map((a) => a.getAttribute("href")),
            code: whole.querySelector("pre").textContent,
            items: [...whole.querySelectorAll("ol > li")].map((item) => item.firstChild.textContent),
            nested: whole.querySelector("ol > li ul > li")?.textContent,
            text: whole.textContent,
        };
        """,
        "# Title\n\nA **bold** and *slanted* `co*d*e`, 2 * 3 * 4, snake_case_name.\n\n"
        "1. one\n   - inner\n2. two\n\n> said\n\n```py\nif a < b:\n    <b>x</b>\n```\n"
        "<img src=x onerror=alert(1)><script>alert(2)</script>\n"
        "[good](https://example.org/a) [bad](javascript:alert(3)) [data](data:text/html,x)",
    )
    assert result["same"] is True
    assert " ".join(result["tags"]) == "a blockquote button code div em h3 li ol p pre span strong svg ul use"
    assert result["links"] == ["https://example.org/a"]
    assert result["code"] == "if a < b:\n    <b>x</b>"
    assert result["items"] == ["one", "two"]
    assert result["nested"] == "inner"
    for literal in (
        "2 * 3 * 4",
        "snake_case_name",
        "co*d*e",
        "<img src=x onerror=alert(1)>",
        "[bad](javascript:",
    ):
        assert literal in result["text"]
