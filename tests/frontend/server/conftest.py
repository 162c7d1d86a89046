"""Servers on a core that does nothing but what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pagewire.frontend.api.async_llm import AsyncLLM
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Client


@pytest.fixture
def engine(core: FakeCore) -> Iterator[AsyncLLM]:
    """An engine on the fake core."""
    engine = AsyncLLM.attach(core.address)
    yield engine
    engine.shutdown()


@pytest.fixture
def serve(engine: AsyncLLM) -> Callable[..., Client]:
    """Makes servers: `serve(api_key=["k"])`."""

    def make(**options: Any) -> Client:
        return Client(engine, **options)

    return make


@pytest.fixture
def client(serve: Callable[..., Client], core: FakeCore) -> Client:
    """A server with default options, on a core that answers by itself."""
    core.auto = True
    return serve()
