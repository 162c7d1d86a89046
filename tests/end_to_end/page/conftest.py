"""A browser, and a server for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def url(address: str) -> Iterator[str]:
    """A server of the demo model that needs a key."""
    from tests.end_to_end.page.browser import serving

    with serving("--attach", address) as url:
        yield url


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests of a module."""
    from tests.end_to_end.page.browser import start_chromium

    driver = start_chromium()
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    """The page at its first visit, with the key given; afterwards, nothing was wrong in the console."""
    from tests.end_to_end.page.browser import Page

    page = Page.first_visit(chromium, url)
    yield page
    assert page.console() == []
