"""Large bodies are decoded one at a time, and everything else has its time in between."""

from __future__ import annotations

import asyncio
import time

import pytest

from pagewire.frontend.server.http.body import SMALL_BODY_BYTES, IncomingBodies

LARGE = SMALL_BODY_BYTES + 1


def test_large_bodies_take_turns_and_small_ones_do_not_wait() -> None:
    async def run() -> None:
        bodies = IncomingBodies(1 << 30)
        seen: list[str] = []

        async def decode(name: str, size: int) -> None:
            async with bodies.turn(size):
                seen.append(name)

        async with bodies.turn(LARGE):
            large = asyncio.ensure_future(decode("large", LARGE))
            await decode("small", SMALL_BODY_BYTES)
            assert seen == ["small"]
        await large
        assert seen == ["small", "large"]

    asyncio.run(run())


def test_others_have_as_much_time_as_a_large_body_took() -> None:
    async def run() -> None:
        bodies = IncomingBodies(1 << 30)
        begin = time.monotonic()
        async with bodies.turn(LARGE):
            while (taken := time.monotonic() - begin) < 0.01:
                pass
        assert time.monotonic() - begin >= 2 * taken * 0.99  # timers of the loop are as coarse as its clock

    asyncio.run(run())


def test_a_body_that_is_refused_or_given_up_ends_its_turn() -> None:
    async def run() -> None:
        bodies = IncomingBodies(1 << 30)
        with pytest.raises(ValueError, match="bad"):
            async with bodies.turn(LARGE):
                raise ValueError("bad")
        async with bodies.turn(LARGE):
            waiting = asyncio.ensure_future(bodies.turn(LARGE).__aenter__())
            await asyncio.wait((waiting,), timeout=0.001)
            waiting.cancel()
        async with bodies.turn(LARGE):
            pass

    asyncio.run(run())
