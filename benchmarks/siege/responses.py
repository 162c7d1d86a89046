"""Responses that are stored, continued, run in the background, streamed from odd places and cancelled."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import Any

from .attack import (
    ANSWER_SECONDS,
    UNANSWERED,
    Target,
    ask,
    connected,
    head,
    log_uniform,
    send,
)

ID = re.compile(rb'"id": ?"(resp_[^"]+)"')
AFTER = (-(10**15), -1, 0, 1, 10**6, 2**63 - 1, 10**30)


async def attack(target: Target, rng: random.Random) -> str:
    """Create a response, and do something odd with it."""
    status, name = await create(target, rng, first_fields(rng))
    if not name:
        return status
    return max([await use(target, rng, name) for _ in range(rng.randint(1, 4))])


async def references(target: Target, rng: random.Random) -> str:
    """Store items that share an id, refer to them very many times, and delete them."""
    count = log_uniform(rng, 10, 16_000)
    items = [{"type": "reasoning", "id": rng.choice(("same", f"id {index}"))} for index in range(count)]
    fields = {"input": [*items, {"role": "user", "content": "a"}], "max_output_tokens": 2}
    status, name = await create(target, rng, fields | {"background": True, "stream": True})
    if not name:
        return status
    names = [rng.choice(("same", f"id {index}")) for index in range(count)]
    again = [{"type": "item_reference", "id": given} for given in names]
    used = await create(target, rng, {"input": again, "previous_response_id": name, "max_output_tokens": 2})
    return max(used[0], await ask(target, rng, f"/v1/responses/{name}", None, method="DELETE"))


def first_fields(rng: random.Random) -> dict[str, Any]:
    """A body that is good."""
    fields: dict[str, Any] = {
        "input": "word " * log_uniform(rng, 1, 500),
        "max_output_tokens": rng.choice((2, 300)),
    }
    fields["background"] = rng.random() < 0.7
    fields["stream"] = rng.random() < 0.7  # in the background its events are kept
    if rng.random() < 0.2:
        fields["metadata"] = {str(index): "x" * 400 for index in range(rng.randint(1, 16))}
    return fields | {"ignore_eos": rng.random() < 0.5, "truncation": "auto"}


async def use(target: Target, rng: random.Random, name: str) -> str:
    """One use of a stored response."""
    path = f"/v1/responses/{name}"
    pick = rng.randrange(6)
    if pick == 0:
        query = f"?stream=true&starting_after={rng.choice(AFTER)}"
        return await ask(target, rng, path + query, None, method="GET")
    if pick == 1:
        return await ask(target, rng, f"{path}/cancel", b"")
    if pick == 2:
        return await ask(
            target, rng, f"{path}/input_items?order={rng.choice(('asc', 'desc', 'x'))}", None, method="GET"
        )
    if pick == 3:
        return await ask(target, rng, path, None, method="DELETE")
    if pick == 4:
        fields = {
            "input": "And then?",
            "previous_response_id": name,
            "max_output_tokens": 2,
            "truncation": "auto",
        }
        calls = [create(target, rng, fields) for _ in range(rng.randint(1, 8))]
        return max(status for status, _ in await asyncio.gather(*calls))
    return await ask(target, rng, path, None, method=rng.choice(("GET", "PUT", "HEAD")))


async def create(target: Target, rng: random.Random, fields: dict[str, Any]) -> tuple[str, str]:
    """Create a response; the status, and the response's id, after which a stream is left. "" if there is none."""
    body = json.dumps(fields).encode()
    async with connected(target, rng) as (reader, writer):
        await send(writer, head(target, "POST", "/v1/responses", len(body)) + body)
        answer, name = b"", None
        try:
            while not name and (data := await asyncio.wait_for(reader.read(1 << 16), ANSWER_SECONDS)):
                answer += data
                name = ID.search(answer)
        except asyncio.TimeoutError:
            return UNANSWERED, ""
        except OSError:
            return "closed", ""
    status = answer.split()[1].decode() if answer.startswith(b"HTTP/") else "closed"
    return status, name[1].decode() if name else ""
