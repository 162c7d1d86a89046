"""The page in a real browser: Chromium by Selenium, where both are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

KEY = "a-key-for-the-page"
SECONDS = 60.0  # until a test gives up
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}


def start_chromium() -> webdriver.Chrome:
    """A browser without a window; skips the test where there is none."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver here (on Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,800"):
        options.add_argument(argument)
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    started.set_script_timeout(SECONDS)
    return started


@contextmanager
def serving(*options: str) -> Iterator[str]:
    """The address of a server that needs `KEY`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewire.cli.main", "serve", *options, "--port", "0"],
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


class Page:
    """The page, as a user has it before them."""

    def __init__(self, chromium: webdriver.Chrome) -> None:
        self.chromium = chromium

    @classmethod
    def first_visit(cls, chromium: webdriver.Chrome, url: str) -> Page:
        """The page in a browser that has not seen it before, with the key given."""
        page = cls(chromium)
        chromium.get(
            url + "/page/icon.svg"
        )  # of the same origin, and without scripts that use what is deleted
        page.run(
            """
            localStorage.clear();
            sessionStorage.setItem("pagewire.key", given[0]);
            await new Promise((resolve, reject) => {
                const request = indexedDB.deleteDatabase("pagewire");
                request.onsuccess = resolve;
                request.onerror = reject;
            });
            """,
            KEY,
        )
        chromium.get(url + "/#chat")
        page.ready()
        return page

    def ready(self) -> None:
        """Wait until the page knows the server's models, and has read what it keeps."""
        self.until("document.querySelector('#settings [name=model]')?.value && document.body.dataset.ready")

    def reload(self) -> None:
        """Load the page again."""
        self.chromium.refresh()
        self.ready()

    def find(self, selector: str) -> WebElement:
        return self.chromium.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.chromium.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Click, wherever on the page it is."""
        element = self.find(selector)
        self.chromium.execute_script("arguments[0].scrollIntoView({ block: 'center' })", element)
        element.click()

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

    def show(self, view: str) -> None:
        """Go to another view."""
        self.find(f"nav a[href='#{view}']").click()

    def ask(self, text: str) -> None:
        self.find("#question").send_keys(text, Keys.ENTER)

    def answered(self, number: int | None = None) -> str:
        """Wait for the end of the answer, and until there are so many messages; the answer's text."""
        if number is not None:
            self.until(f"document.querySelectorAll('#messages > li').length == {number}")
        self.until("document.querySelector('#messages > li:last-child:not([aria-busy]) .note')?.textContent")
        return self.find("#messages > li:last-child .text").text

    def again(self) -> None:
        """Generate the last answer again."""
        self.click("#messages > li:last-child [aria-label='Generate again']")

    def open_settings(self) -> None:
        """Open the settings, and have the likeliest tokens."""
        self.find("#open-settings").click()
        self.until("document.querySelector('#settings').open")
        self.set("temperature", "0")

    def set(self, name: str, value: str) -> None:
        """Fill in a field of the settings."""
        field = self.find(f"#settings [name={name}]")
        field.clear()
        field.send_keys(value, Keys.TAB)

    def write_much(self, tokens: int) -> None:
        """Have answers of so many tokens. The demo model ends most of its own before anybody could see them come:
        a field that the page has not prevents that.
        """
        self.set("max_tokens", str(tokens))
        self.run(
            """
            const more = Object.assign(document.createElement("input"), { name: "min_tokens", type: "number" });
            more.value = given[0];
            document.querySelector("#settings-form").append(more);
            """,
            tokens,
        )

    def console(self) -> list[str]:
        """What the browser wrote to the console since the last call. Some time after `first_visit`, it looks for an
        icon of the icon that was visited; the page names its own.
        """
        entries = [entry["message"] for entry in self.chromium.get_log("browser")]
        return [entry for entry in entries if "/favicon.ico " not in entry]

    def refusals(self) -> list[str]:
        """What the browser wrote to the console of refused calls; nothing else may stand there."""
        entries = self.console()
        assert all("status of 4" in entry for entry in entries), entries
        return entries
