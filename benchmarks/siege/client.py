"""The well-behaved client: short requests again and again, whose answers are known, and how long it waited."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from .fortress import GOOD_KEY, MODEL, PICTURES
from .media_files import plain_png
from .pictures import part

WAIT_SECONDS = 2.0  # longest wait for an answer to begin, or to go on
# Likewise with a schema never seen, which must be compiled behind those of others; and a picture, which is decoded
# and processed behind theirs.
SLOW_SECONDS = {"schema": 10.0, "picture": 10.0}
RESTART_SECONDS = 60.0  # likewise where the wait began before a killed worker was replaced
HANG_SECONDS = 120.0  # an answer that takes longer does not come
STUCK_SECONDS = 30.0  # over the limit of a wait: the siege is called off, for it has failed
PAUSE_SECONDS = 0.1
READY_SECONDS = 0.1  # between two looks whether a new worker serves
NUM_TOKENS = 12
COMPLETION = {
    "prompt": 'The "with" statement is used to',
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "stream": True,
    "return_token_ids": True,
}
CHAT = {
    "messages": [{"role": "user", "content": "What is a list?"}],
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "stream": True,
    "return_token_ids": True,
}


@dataclass(frozen=True)
class Wait:
    """A time that the client waited, on the monotonic clock.

    kind: for what. restart: a worker was killed. allowed: the longest that such a wait may be, undisturbed.
    stages: where the server says that the time went (its header Server-Timing).
    """

    kind: str
    begin: float
    seconds: float
    restart: bool = False
    allowed: float = WAIT_SECONDS
    stages: str = ""

    @property
    def limit(self) -> float:
        """The longest that it may be."""
        if self.restart:
            return RESTART_SECONDS
        return max(SLOW_SECONDS.get(self.kind, 0.0), self.allowed)


@dataclass
class Client:
    """One client with a connection of its own. waits: all so far. wrong: answers that were not the right ones.

    pictures: there is a model that takes some.
    """

    url: str
    max_wait: float = WAIT_SECONDS
    pictures: bool = False
    waits: list[Wait] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    num_answers: int = 0
    _expected: dict[str, Any] = field(default_factory=dict)
    _served_since: float | None = (
        0.0  # by the present worker; None: one was killed, and the next is not ready
    )
    _killed: asyncio.Event = field(default_factory=asyncio.Event)
    _num_killed: int = 0
    _number: int = 0
    _waiting_since: float | None = None

    def connection(self) -> aiohttp.ClientSession:
        """A session on the server."""
        headers = {"Authorization": f"Bearer {GOOD_KEY}"}
        timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
        return aiohttp.ClientSession(self.url, headers=headers, timeout=timeout)

    def worker_killed(self) -> None:
        """Excuse waits that begin before the next worker is ready."""
        self._served_since = None
        self._num_killed += 1
        self._killed.set()

    @property
    def served(self) -> bool:
        """True while the present worker serves, as far as is known."""
        return self._served_since is not None

    async def follow_restarts(self) -> None:
        """See by `/metrics`, after each kill, when the next worker serves; until cancelled.

        `/ready` would not do: its answer may be a second old, and a worker may start in less.
        """
        async with self.connection() as http:
            while True:
                await self._killed.wait()
                self._killed.clear()
                while not await self._replaced(http):
                    await asyncio.sleep(READY_SECONDS)
                if not self._killed.is_set():
                    self._served_since = time.monotonic()

    async def _replaced(self, http: aiohttp.ClientSession) -> bool:
        """Whether the server says that a worker serves in the place of the last one killed."""
        try:
            async with http.get("/metrics") as response:
                if response.status != 200:
                    return False
                text = await response.text()
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        # Some are the server's, of no model; those of a model are missing while its core does not answer.
        values = {sample.name: sample.value for sample in samples if sample.labels.get("model_name") == MODEL}
        restarts = values.get("pagewire:worker_restarts_total", -1)
        return restarts >= self._num_killed and values.get("pagewire:workers_ready") == 1

    async def learn(self) -> None:
        """See what undisturbed answers are; they must be the same twice."""
        async with self.connection() as http:
            for _ in range(2):
                await self.ask_all(http)
        if self.wrong:
            raise RuntimeError(f"before the siege: {self.wrong}")
        self.waits.clear()

    async def run(self) -> None:
        """Ask until cancelled."""
        async with self.connection() as http:
            while True:
                try:
                    await self.ask_all(http)
                except Exception as error:  # whatever an answer lacks is the server's fault
                    self.end()
                    self.wrong.append(f"no answer: {error!r:.300}")
                    await asyncio.sleep(1.0)
                await asyncio.sleep(PAUSE_SECONDS)

    async def ask_all(self, http: aiohttp.ClientSession) -> None:
        """Ask everything once."""
        self._number += 1
        self._same("completion", await self._stream(http, "/v1/completions", COMPLETION))
        self._same("chat", await self._stream(http, "/v1/chat/completions", CHAT))
        await self._health()
        await self._schema(http)
        if self.pictures:
            await self._picture(http)

    async def _health(self) -> None:
        """The state of the server, over a new connection."""
        begin = self._begin()
        async with self.connection() as http, http.get("/health") as response:
            self._waited("health", begin)
            if not (
                response.status == 503 and self._excused(begin)
            ):  # a worker that starts is not proven to live
                self._same("health", response.status)

    async def _stream(self, http: aiohttp.ClientSession, path: str, fields: dict[str, Any]) -> list[int]:
        """The tokens of a streamed answer."""
        tokens: list[int] = []
        begin = self._begin()
        async with http.post(path, json=fields) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if tokens:
                    self._waited("token", begin)
                else:
                    self._waited("first token", begin, response.headers.get("Server-Timing", ""))
                begin = self._begin()
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(f"in the stream: {event}")
                    tokens += event["choices"][0].get("token_ids") or [] if event["choices"] else []
        self._waiting_since = None
        return tokens

    async def _answer(self, http: aiohttp.ClientSession, kind: str, path: str, fields: dict[str, Any]) -> str:
        """The text of an answer in one piece."""
        begin = self._begin()
        async with http.post(path, json=fields) as response:
            answer = await response.json()
            self._waited(kind, begin, response.headers.get("Server-Timing", ""))
            if response.status != 200:
                raise ValueError(f"status {response.status}: {answer}")
        choice = answer["choices"][0]
        return str(choice["message"]["content"] if "message" in choice else choice["text"])

    async def _picture(self, http: aiohttp.ClientSession) -> None:
        """A question about a picture never seen, of a size that hardly was."""
        data = plain_png(20 + self._number % 50, 20 + self._number // 50 % 50, (self._number % 256, 0, 0))
        messages = [{"role": "user", "content": [part("image", data), {"type": "text", "text": "What?"}]}]
        fields = {"model": PICTURES, "messages": messages, "max_tokens": 4, "temperature": 0}
        await self._answer(http, "picture", "/v1/chat/completions", fields)
        self.num_answers += 1

    async def _schema(self, http: aiohttp.ClientSession) -> None:
        """A request under a schema never seen, which allows one value only."""
        name = f"field{self._number}"
        schema = {
            "type": "object",
            "properties": {name: {"const": 1}},
            "required": [name],
            "additionalProperties": False,
        }
        constraint = {"json": schema, "disable_any_whitespace": True}
        fields = {"prompt": "Answer: ", "max_tokens": 40, "temperature": 0, "structured_outputs": constraint}
        text = await self._answer(http, "schema", "/v1/completions", fields)
        if json.loads(text) != {name: 1}:
            self.wrong.append(f"an answer under a schema was {text!r:.200}")
        self.num_answers += 1

    def open_wait(self) -> list[Wait]:
        """The wait that is not over yet, if there is one."""
        if self._waiting_since is None:
            return []
        seconds = time.monotonic() - self._waiting_since
        return [
            Wait(
                "unfinished", self._waiting_since, seconds, self._excused(self._waiting_since), self.max_wait
            )
        ]

    async def stuck(self) -> None:
        """Return once a wait is over its limit by `STUCK_SECONDS`: the siege has failed then."""
        while not any(wait.seconds > STUCK_SECONDS + wait.limit for wait in self.open_wait()):
            await asyncio.sleep(0.5)

    def end(self) -> None:
        """Count the wait that is not over as one that is."""
        self.waits += self.open_wait()
        self._waiting_since = None

    def _begin(self) -> float:
        self._waiting_since = time.monotonic()
        return self._waiting_since

    def _waited(self, kind: str, begin: float, stages: str = "") -> None:
        """Note a wait until now."""
        now = time.monotonic()
        self.waits.append(Wait(kind, begin, now - begin, self._excused(begin), self.max_wait, stages))
        self._waiting_since = None

    def _excused(self, begin: float) -> bool:
        """Whether a wait that began then may be one for a new worker."""
        return self._served_since is None or begin < self._served_since

    def _same(self, name: str, value: Any) -> None:
        """Note an answer, which must be what it was the first time."""
        self.num_answers += 1
        if self._expected.setdefault(name, value) != value:
            self.wrong.append(f"{name}: {value!r:.200} and not {self._expected[name]!r:.200}")
