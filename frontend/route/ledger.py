"""The requests that a router has sent to its cores: where each is, and what that means for the next one. No IO."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec

from pagewire.frontend.route.placement import CoreLoad, Policy, choose_core, next_in_turn
from pagewire.frontend.route.prefix_index import PrefixIndex
from pagewire.frontend.route.replica import Placement, Replica
from pagewire.ipc.wire.block_names import prompt_names
from pagewire.ipc.wire.messages import EngineInfo, Request, TokenDelta
from pagewire.ipc.wire.pooling import PoolingParams

LINGER_SECONDS = 1.0  # for which the blocks of an ended request count as cached: until the core reports them
MAX_BEGINNINGS = 1 << 13  # beginnings of prompts whose last core is remembered


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a request makes for a core.

    num_tokens: to compute or find cached, those generated before included. names: of its full blocks; none if it
        pools the states of all its tokens, for then it finds nothing cached, and may be many prompts at a time.
        Only cores know the content of an adapter, by which they name blocks; its name stands in for that here, so
        that a prompt goes where the same one with this adapter went before.
    """

    request: Request
    num_tokens: int
    block_size: int
    names: list[bytes]

    @classmethod
    def of(cls, request: Request, info: EngineInfo) -> Work:
        """The work of a request; its blocks are named as the cores of `info` will name them."""
        prompt, done = request.prompt, request.output_token_ids
        if done is not None and len(done) == 1 and done[0]:
            prompt = msgspec.structs.replace(prompt, token_ids=[*prompt.token_ids, *done[0]])
        if (source := request.adapter) is not None:
            key = "\0".join((source.name, source.path, source.version)).encode()
            prompt = msgspec.structs.replace(prompt, adapter=sha256(key).digest())
        pools_all = isinstance(request.task, PoolingParams) and request.task.all_tokens
        names = [] if pools_all else prompt_names(prompt, info.block_size, info.short_length)
        return cls(request, len(prompt.token_ids), info.block_size, names)

    def num_cached(self, depth: int) -> int:
        """Tokens found cached where the first `depth` blocks are: the last token is always computed."""
        return min(depth, max(0, self.num_tokens - 1) // self.block_size) * self.block_size

    @property
    def reads_cache(self) -> bool:
        """False if the core computes the whole prompt in any case, for its result needs all positions."""
        task = self.request.task
        return isinstance(task, PoolingParams) or task.prompt_logprobs is None


class Ledger:
    """Placements by the keys of requests. Not thread-safe; times are in seconds on any clock.

    Attributes:
        index: which core has which blocks. placed: the requests that were sent and have not ended.
    """

    def __init__(self, policy: Policy) -> None:
        self.index = PrefixIndex()
        self.placed: dict[int, Placement] = {}
        self._policy = policy
        self._num_requests = 0
        self._last: OrderedDict[bytes, int] = OrderedDict()  # by first block, where it went
        self._ended: deque[tuple[float, int, list[bytes]]] = deque()

    def pick(self, work: Work, replicas: Sequence[Replica]) -> Replica:
        """The core for a request. replicas: those that may get it, at least one."""
        if len(replicas) == 1:
            return replicas[0]
        by_number = {replica.number: replica for replica in replicas}
        depths = self.index.depths(work.names, by_number) if work.reads_cache else dict.fromkeys(by_number, 0)
        candidates = [
            CoreLoad(
                number,
                work.num_cached(depths[number]),
                replica.num_waiting,
                replica.num_running,
                replica.num_placed,
            )
            for number, replica in by_number.items()
        ]
        if self._policy == "round-robin":
            return by_number[next_in_turn(candidates, self._num_requests)]
        last = self._last.get(work.names[0]) if work.names else None
        return by_number[choose_core(work.num_tokens, candidates, last)]

    def put(self, work: Work, replica: Replica, now: float) -> Placement:
        """Record that a request is sent to a core, and is no longer on another one."""
        self.drop(work.request.key, now)
        self._forget_ended(now)
        request, core = work.request, replica.number
        depth = self.index.depths(work.names, [core])[core] if work.reads_cache else 0
        num_cached = work.num_cached(depth)
        num_sequences = 1 if isinstance(request.task, PoolingParams) else request.task.n
        live = set(range(num_sequences))
        placement = Placement(replica, request, work.names, work.num_tokens - num_cached, live)
        self.placed[request.key] = placement
        self.index.expect(core, work.names)
        self._num_requests += 1
        replica.num_placed += 1
        replica.num_waiting += placement.num_waiting
        replica.num_prompt_tokens += work.num_tokens
        replica.num_cached_tokens += num_cached
        if work.names:
            self._last[work.names[0]] = core
            self._last.move_to_end(work.names[0])
            if len(self._last) > MAX_BEGINNINGS:
                self._last.popitem(last=False)
        return placement

    def on(self, replica: Replica) -> list[int]:
        """The keys of the requests on a core."""
        return [key for key, placement in self.placed.items() if placement.replica is replica]

    def is_on(self, key: int, replica: Replica) -> bool:
        """True if a request is on a core: not ended, nor gone elsewhere."""
        placement = self.placed.get(key)
        return placement is not None and placement.replica is replica

    def record_output(self, key: int, replica: Replica) -> bool:
        """Record output of a request on a core; False, and nothing is recorded, if it is not there (`is_on`)."""
        placement = self.placed.get(key)
        if placement is None or placement.replica is not replica:
            return False
        if not placement.started:
            placement.started = True
            replica.num_waiting -= placement.num_waiting
            placement.num_waiting = 0
            replica.num_running += len(placement.live)
        return True

    def output(self, replica: Replica, delta: TokenDelta, now: float) -> None:
        """Record output of a request on a core, and the end of a sequence if it is one."""
        if self.record_output(delta.key, replica) and delta.finish_reason is not None:
            self.end_sequence(delta.key, delta.index, now)

    def end_sequence(self, key: int, index: int, now: float) -> None:
        """Record that a sequence of a request has ended: the core says so, or it was aborted, or both."""
        placement = self.placed.get(key)
        if placement is None or index not in placement.live:
            return
        placement.live.remove(index)
        placement.replica.num_running -= placement.started
        if not placement.live:
            self.drop(key, now)

    def drop(self, key: int, now: float) -> Placement | None:
        """Forget a request, which has ended or goes on elsewhere; None if it is unknown."""
        placement = self.placed.pop(key, None)
        if placement is not None:
            replica = placement.replica
            replica.num_waiting -= placement.num_waiting
            replica.num_running -= len(placement.live) * placement.started
            self._ended.append((now + LINGER_SECONDS, replica.number, placement.names))
        return placement

    def forget(self, replica: Replica, now: float) -> list[int]:
        """Forget the requests and the blocks of a core that is gone. Returns the keys of the requests."""
        keys = self.on(replica)
        for key in keys:
            self.drop(key, now)
        self._ended = deque(entry for entry in self._ended if entry[1] != replica.number)
        self.index.forget(replica.number)
        return keys

    def _forget_ended(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now:
            _, core, names = self._ended.popleft()
            self.index.unexpect(core, names)
