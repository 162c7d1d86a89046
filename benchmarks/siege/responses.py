"""Responses that are stored, continued, run in the background, streamed from odd places and cancelled."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from .attack import (
    ANSWER_SECONDS,
    MAX_ANSWER_BYTES,
    UNANSWERED,
    Target,
    ask,
    connected,
    head,
    log_uniform,
    send,
)

AFTER = (-(10**15), -1, 0, 1, 10**6, 2**63 - 1, 10**30)


async def attack(target: Target, rng: random.Random) -> str:
    """Create a response, and do something odd with it."""
    created = await create(target, rng, first_fields(rng))
    if not isinstance(created, dict):
        return created
    name, statuses = created.get("id", "none"), []
    for _ in range(rng.randint(1, 4)):
        statuses.append(await use(target, rng, name))
    return max(statuses)


def first_fields(rng: random.Random) -> dict[str, Any]:
    """A body that is good."""
    fields: dict[str, Any] = {
        "input": "word " * log_uniform(rng, 1, 500),
        "max_output_tokens": rng.choice((2, 300)),
    }
    if rng.random() < 0.5:
        fields["background"] = True
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
        answers = await asyncio.gather(*calls)
        return max(answer if isinstance(answer, str) else "200" for answer in answers)
    return await ask(target, rng, path, None, method=rng.choice(("GET", "PUT", "HEAD")))


async def create(target: Target, rng: random.Random, fields: dict[str, Any]) -> dict[str, Any] | str:
    """Create a response; its object, or the status of an answer that has none."""
    body = json.dumps(fields).encode()
    async with connected(target, rng) as (reader, writer):
        await send(writer, head(target, "POST", "/v1/responses", len(body)) + body)
        try:
            answer = await asyncio.wait_for(reader.read(MAX_ANSWER_BYTES), ANSWER_SECONDS)
            while data := await asyncio.wait_for(reader.read(MAX_ANSWER_BYTES), ANSWER_SECONDS):
                answer += data
        except asyncio.TimeoutError:
            return UNANSWERED
        except OSError:
            return "closed"
    line, _, text = answer.partition(b"\r\n\r\n")
    status = line.split()[1].decode() if line else "closed"
    if status != "200":
        return status
    try:
        response: dict[str, Any] = json.loads(text)
    except ValueError:
        return "no JSON"
    return response
