"""Requests of many kinds to a server, what an undisturbed engine answers to them, and clients that leave midway.

Used by the tests and by `python -m benchmarks.serve_faults`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from pagewire import AsyncLLM
from pagewire.frontend.requests.checked_params import default_sampling_params
from pagewire.frontend.text.chat_template import chat_prompt

TOPICS = ("list", "tuple", "class", "module", "import", "with", "yield", "lambda", "assert", "string", "é😀")
STOPS = (None, None, [" the"], ["\n", "e i"], ["."])
STRUCTURES: tuple[dict[str, Any], ...] = (
    {"choice": ["yes", "no, never", "nobody knows"]},
    {"regex": "[a-z]{3,8}( [a-z]{2,5}){0,3}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)
SHARE_LEAVING = 0.2
SHARE_STRUCTURED = 0.15
LOGPROB_TOLERANCE = 1e-5


@dataclass(frozen=True)
class MixedRequest:
    """A request, in the words of the server and of the engine.

    Attributes:
        path, body: as it is posted. prompts: for the engine; of a chat, its one conversation.
        fields: of SamplingParams. num_logprobs: as asked for; None: none.
        leaves_after: events until the client leaves: its own of a stream, else anybody's. None: it stays.
    """

    path: str
    body: dict[str, Any]
    prompts: list[Any]
    fields: dict[str, Any]
    num_logprobs: int | None
    leaves_after: int | None

    @property
    def is_chat(self) -> bool:
        """True for a chat."""
        return "chat" in self.path


@dataclass
class Choice:
    """One choice of an answer, or what has come of it."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: list[float] = field(default_factory=list)


Answer = dict[int, Choice]


def draw_request(rng: random.Random) -> MixedRequest:
    """One request of any kind. Its answer is determined: greedy, or with a seed."""
    fields: dict[str, Any] = {
        "max_tokens": rng.choice((1, 4, 16, 48, 100)),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "temperature": rng.choice((0.0, 0.7, 1.0)),
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((0, 20)),
        "min_p": rng.choice((0.0, 0.05)),
        "repetition_penalty": rng.choice((1.0, 1.2)),
        "presence_penalty": rng.choice((0.0, 0.5)),
        "ignore_eos": rng.random() < 0.3,
        "seed": rng.randrange(1 << 31),
        "stop": rng.choice(STOPS),
    }
    fields["n"] = 1 if fields["temperature"] == 0 else fields["n"]
    if rng.random() < SHARE_STRUCTURED:
        fields["structured_outputs"] = rng.choice(STRUCTURES)
    num_logprobs = rng.choice((None, None, 0, 2))
    stream = rng.random() < 0.6
    body: dict[str, Any] = {"model": "demo", **fields, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    words = " ".join(rng.choices(TOPICS, k=rng.choice((1, 5, 40, 120))))
    prompts: list[Any]
    if rng.random() < 0.5:
        prompts = [[{"role": "user", "content": f"What is a {words}?"}]]
        path, body["messages"] = "/v1/chat/completions", prompts[0]
        if num_logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": num_logprobs}
    else:
        prompts = [f"The {words}", [rng.randrange(10, 4000) for _ in range(rng.choice((1, 16, 90)))]]
        prompts = [prompts[rng.randrange(2)]] if rng.random() < 0.8 else [prompts[0], prompts[0][:-1] + "x"]
        path, body["prompt"] = "/v1/completions", prompts[0] if len(prompts) == 1 else prompts
        body["logprobs"] = num_logprobs
    leaves = rng.randrange(1, 8) if rng.random() < SHARE_LEAVING else None
    return MixedRequest(path, body, prompts, fields, num_logprobs, leaves)


# ---------------------------------------------------------------- without a server


async def undisturbed(llm: AsyncLLM, request: MixedRequest) -> Answer:
    """What the engine answers by itself."""
    params = msgspec.structs.replace(
        default_sampling_params(llm.info), **request.fields, logprobs=request.num_logprobs
    )
    answer: Answer = {}
    for index, given in enumerate(request.prompts):
        prompt = given
        if request.is_chat:
            tokenizer = await llm.get_tokenizer()
            assert tokenizer is not None
            prompt = chat_prompt(tokenizer.tokenizer, given)
        async for output in llm.generate(prompt, params):
            final = output
        for part in final.outputs:
            answer[index * params.n + part.index] = Choice(
                part.text,
                part.finish_reason,
                part.stop_reason,
                [row[token].logprob for row, token in zip(part.logprobs or (), part.token_ids, strict=False)],
            )
    return answer


# ---------------------------------------------------------------- through a server


class Crowd:
    """Clients of one server, and how many events all of them have seen."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.http = http
        self.events = 0
        self._changed = asyncio.Condition()

    async def ask(self, request: MixedRequest) -> tuple[Answer, bool]:
        """The answer, or what has come of it; and whether it is whole.

        Raises:
            AssertionError: an error status. aiohttp.ClientError, OSError: the server is gone.
        """
        if not request.body["stream"]:
            return await self._ask_at_once(request)
        answer: Answer = {}
        async with self.http.post(request.path, json=request.body) as response:
            assert response.status == 200, await response.text()
            count, usage = 0, None
            async for event in events(response):
                if event is None:
                    check_usage(answer, usage, request)
                    return answer, True
                assert "error" not in event, event
                usage = event["usage"]
                add(answer, event)
                await self._count()
                count += 1
                if count == request.leaves_after:
                    response.close()
                    return answer, False
        raise aiohttp.ClientPayloadError("the stream ended without [DONE]")

    async def _ask_at_once(self, request: MixedRequest) -> tuple[Answer, bool]:
        task = asyncio.ensure_future(self._whole(request))
        waiting = {task}
        if request.leaves_after is not None:
            waiting.add(asyncio.ensure_future(self.after(request.leaves_after)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return {}, False
            await self._count()
            return await task, True
        finally:
            for one in waiting:
                one.cancel()
            await asyncio.wait(waiting)

    async def _whole(self, request: MixedRequest) -> Answer:
        answer: Answer = {}
        async with self.http.post(request.path, json=request.body) as response:
            assert response.status == 200, await response.text()
            found = await response.json()
        add(answer, found)
        check_usage(answer, found["usage"], request)
        return answer

    async def after(self, count: int) -> None:
        """Wait for so many further events."""
        target = self.events + count
        async with self._changed:
            await self._changed.wait_for(lambda: self.events >= target)

    async def _count(self) -> None:
        self.events += 1
        async with self._changed:
            self._changed.notify_all()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """The events of a stream; None for [DONE]."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield None if line == b"data: [DONE]\n" else json.loads(line[6:])


def add(answer: Answer, found: dict[str, Any]) -> None:
    """Add the choices of an answer or event."""
    for part in found["choices"]:
        choice = answer.setdefault(part["index"], Choice())
        assert choice.finish_reason is None, "something came after the end"
        choice.finish_reason, choice.stop_reason = part["finish_reason"], part.get("stop_reason")
        logprobs = part.get("logprobs") or {}
        if "text" in part:
            choice.text += part["text"]
            choice.logprobs += logprobs.get("token_logprobs") or ()
        else:
            choice.text += (part.get("message") or part["delta"]).get("content") or ""
            choice.logprobs += [one["logprob"] for one in logprobs.get("content") or ()]


def check_usage(answer: Answer, usage: Any, request: MixedRequest) -> None:
    """The counts agree with each other and, where the log probabilities tell, with the answer."""
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 < usage["completion_tokens"] <= len(answer) * request.fields["max_tokens"]
    if request.num_logprobs is not None:
        assert usage["completion_tokens"] == sum(len(choice.logprobs) for choice in answer.values())


def same(found: Answer, expected: Answer, whole: bool) -> bool:
    """True if the answer is right; of one that was cut off, as far as it goes."""
    if whole and found.keys() != expected.keys():
        return False
    return all(agrees(choice, expected[index], whole) for index, choice in found.items())


def agrees(found: Choice, expected: Choice, whole: bool) -> bool:
    """True if a choice is right, or a right beginning."""
    pairs = zip(found.logprobs, expected.logprobs, strict=False)
    if any(abs(a - b) > LOGPROB_TOLERANCE for a, b in pairs):
        return False
    if not whole and found.finish_reason is None:
        return expected.text.startswith(found.text) and len(found.logprobs) <= len(expected.logprobs)
    return (found.text, found.finish_reason, found.stop_reason, len(found.logprobs)) == (
        expected.text,
        expected.finish_reason,
        expected.stop_reason,
        len(expected.logprobs),
    )


async def run_crowd(
    crowd: Crowd, requests: Sequence[MixedRequest], expected: Sequence[Answer], concurrency: int
) -> tuple[Counter[str], list[str]]:
    """Send them all, so many at a time: how many were right, left, or wrong; and what was wrong."""
    places, counts, wrong = asyncio.Semaphore(concurrency), Counter[str](), list[str]()

    async def one(request: MixedRequest, right: Answer) -> None:
        async with places:
            try:
                found, whole = await crowd.ask(request)
            except (AssertionError, KeyError, TypeError) as error:
                counts["wrong"] += 1
                wrong.append(f"{request}: {error!r}")
                return
            if not same(found, right, whole):
                counts["wrong"] += 1
                wrong.append(f"{request}: {found} instead of {right}")
            else:
                counts["whole" if whole else "left"] += 1

    await asyncio.gather(*(one(*pair) for pair in zip(requests, expected, strict=True)))
    return counts, wrong
