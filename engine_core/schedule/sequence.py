"""The state of one sequence in the core."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from enum import Enum

from pagewire.engine_core.schedule.attachments import ActiveAdapter, EncoderInput, GrammarPosition, Tenant
from pagewire.engine_core.schedule.blocks import Block
from pagewire.ipc.suspicion import NO_SUSPICION, SEQUENCE_RULE, Suspicion
from pagewire.ipc.wire.block_names import LONG, encoded_keys, name_blocks
from pagewire.ipc.wire.items import RetainedPrefix
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request, RequestTiming


class State(Enum):
    """Scheduling state of a sequence: in the queue, in a slot, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class WeightsVersion:
    """The weights that the model has; the default: those that the engine has started with.

    name: outputs say it. key: a part of the names of blocks; no other weights ever have the same one.
    """

    name: str = ""
    key: bytes = b""


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n sequences of a request.

        token_ids   [ prompt ............ | output ........ ]
        computed     ------------------------------->           KV written, or launched
        num_pending                                        ++   sampled in flight, not yet known

    client: the frontend's identity. request: what it submitted, with `key`. index: 0 to n - 1.
    awaited: the frontend waits for its output; False once it has given the sequence up, and behind the end.
    arrival: position in the order of arrival. max_output: maximum number of output tokens.
    longest: the most tokens that it may have, those of the prompt included.
    eos_token_id, stop_token_ids: tokens that end it; None if no end of sequence does, or it is ignored.
    room: tokens for which its blocks have room.
    plain_end: while it has computed fewer tokens than this, its next row runs one token and samples the next, and
        nothing else is to be done: it needs no block, has none to name, and does not end by length. 0: not so.
    tenant: whose sequence it is. turn: its place among those of the tenant, while it waits.
    num_in_flight: plans in flight that run this sequence. last_samples: how many tokens the last plan samples.
    suspicion: that workers crash of it.
    namespace: prefixes are shared within a namespace only; empty for that of all requests.
    num_cached_tokens: tokens found in the prefix cache on first admission; None before that.
    num_prompt_logprobs: prompt log probabilities that were returned.
    num_sent: of `token_ids`, those that all workers have, since it got its slot.
    token_gap: seconds between the last two tokens; 0 until there are two.
    matcher: its position in the grammar of its structured output; None without one.
    pools: it ends with a pooled result and generates no tokens. params: those of a sequence that generates.
    returns_prompt_logprobs: they are requested; only the first of n sequences returns them.
    whole: its prompt is computed in one step.
    shared_end: of the prefix whose blocks were found in the cache, even if other groups had less of it.
    recomputed_end: of tokens that it runs again since a row with drafts went wrong; not more than `computed`: there
        are none.
    drafts: what `Speculation` keeps of it, and no one else reads; None before that is anything.
    adapter: that it runs with; None: the model alone.
    angles_end: the most tokens that its rotary angles are for; with more it begins anew, as a long sequence.
    is_long: it has the rotary angles of long sequences.
    was_read: a part of its prefix was read from a cold tier since it last waited, or could not be.
    retained: what became of the wishes of its request that prefixes stay cached.
    features: of the pictures and sounds of its prompt, in order. cuts_media: a step may compute a part of one.
    weights: that it runs with, or will. versions: which ones gave its tokens, see `TokenDelta.weights`.
    num_versions_told: of these, those that a delta has said.

    Times are in seconds on the monotonic clock, 0 until they are known.
    """

    client: bytes
    request: Request
    index: int
    seed: int
    arrival: int
    arrival_time: float
    token_ids: list[int]
    num_prompt_tokens: int
    max_output: int
    tenant: Tenant
    turn: int = 0
    namespace: bytes = b""
    whole: bool = False
    angles_end: int = sys.maxsize
    is_long: bool = False
    matcher: GrammarPosition | None = None
    features: Sequence_[EncoderInput] = ()
    cuts_media: bool = False

    state: State = State.WAITING
    awaited: bool = False
    computed: int = 0
    num_pending: int = 0
    suspicion: Suspicion = NO_SUSPICION
    slot: int = -1
    num_in_flight: int = 0
    last_samples: int = 0
    blocks: list[Block] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    shared_end: int = 0
    recomputed_end: int = 0
    num_cached_tokens: int | None = None
    was_read: bool = False
    retained: Sequence_[RetainedPrefix] = ()
    num_prompt_logprobs: int = 0
    num_sent: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    token_gap: float = 0.0
    room: int = 0
    plain_end: int = 0
    key: int = field(init=False)
    longest: int = sys.maxsize
    eos_token_id: int | None = None
    stop_token_ids: Sequence_[int] = ()
    pools: bool = field(init=False)
    params: SamplingParams = field(init=False)
    returns_prompt_logprobs: bool = False
    drafts: object | None = None
    adapter: ActiveAdapter | None = None
    weights: WeightsVersion = WeightsVersion()
    versions: list[tuple[int, str]] = field(default_factory=list)
    num_versions_told: int = 0

    def __post_init__(self) -> None:
        self.key, self.pools = self.request.key, isinstance(self.request.task, PoolingParams)
        if not self.pools:
            self.longest = self.num_prompt_tokens + self.max_output
            self.params = self.request.params
            self.stop_token_ids = self.params.stop_token_ids or ()
            self.eos_token_id = None if self.params.ignore_eos else self.request.eos_token_id
            self.returns_prompt_logprobs = self.params.prompt_logprobs is not None and self.index == 0

    @property
    def request_id(self) -> str:
        """The request's public id."""
        return self.request.request_id

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens that are known, without those in flight."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Number of tokens that the next steps must compute.

        0 if nothing is left to compute, and while a plan in flight samples several tokens, of which not all need
        count or come: where the sequence goes on is not known before that step returns.
        """
        length = len(self.token_ids) + self.num_pending
        if length >= self.longest or (self.last_samples > 1 and self.num_in_flight):
            return 0
        if length > self.angles_end:
            length = self.angles_end
        return length - self.computed

    @property
    def decodes(self) -> bool:
        """True if its next row runs one token that was never run before, and so can be followed by drafts."""
        return self.num_to_compute - max(0, self.recomputed_end - self.computed) == 1

    def begin_plain(self, block_size: int) -> None:
        """Set `plain_end`; called when a row was launched that samples its next token, and its cache is filled."""
        is_told = self.num_versions_told == len(self.versions)
        if self.matcher is None and self.suspicion is NO_SUSPICION and self.first_token_time and is_told:
            named_end = (self.num_registered + 1) * block_size
            self.plain_end = min(self.room, named_end, self.longest - 1, self.angles_end)

    def choose_angles(self) -> None:
        """Choose rotary angles by the number of tokens; called while it has neither slot nor blocks."""
        if len(self.token_ids) > self.angles_end:
            self.angles_end, self.is_long = sys.maxsize, True
            self.block_names.clear()  # of blocks with other keys

    @property
    def needs_all_positions(self) -> bool:
        """True if the result depends on the hidden states of all prompt tokens, so that none may be cached."""
        task = self.request.task
        return task.all_tokens if isinstance(task, PoolingParams) else self.returns_prompt_logprobs

    @property
    def finished(self) -> bool:
        """True if the sequence has ended."""
        return self.state is State.FINISHED

    def launch(self, num_tokens: int, num_samples: int) -> None:
        """Record that a step runs the next `num_tokens` tokens and samples `num_samples`."""
        self.num_in_flight += 1
        self.last_samples = num_samples
        self.computed += num_tokens
        self.num_pending += num_samples

    def prolong(self, num_steps: int) -> None:
        """Record that the step just launched is followed by more, each with one token and one sample."""
        self.plain_end = 0
        self.last_samples += num_steps
        self.computed += num_steps
        self.num_pending += num_steps

    def land(self, num_samples: int) -> None:
        """Record that the oldest step in flight, which sampled `num_samples`, has returned."""
        self.num_in_flight -= 1
        self.num_pending -= num_samples

    def send_tokens(self, start: int) -> list[int]:
        """The tokens from `start` on, for a plan with which all workers get them."""
        self.num_sent = len(self.token_ids)
        return self.token_ids[start:]

    def crash(self) -> None:
        """Record that the worker was lost with steps of this sequence in flight."""
        self.suspicion = self.suspicion.after_crash()
        self.num_in_flight = self.num_pending = 0

    def survive(self, *, alone: bool) -> None:
        """Record a step that gave a token after a crash; enough of them alone clear the sequence."""
        self.suspicion = self.suspicion.after_step(SEQUENCE_RULE, alone=alone)

    @property
    def suspect(self) -> bool:
        """True if workers have crashed so often with this sequence in flight that it runs alone."""
        return self.suspicion.is_suspect(SEQUENCE_RULE)

    @property
    def guilty(self) -> bool:
        """True if workers have crashed with this sequence alone in flight, as often as it takes to end it."""
        return self.suspicion.is_guilty(SEQUENCE_RULE)

    def boundary(self, end: int) -> int:
        """The last position up to `end` at which a step may end: `end`, or the start of a medium around it.

        Embeddings may be cut anywhere, and so may media unless their tokens attend to each other. Of a sequence
        that runs as a whole it is the end of the prompt, or else where the sequence is.
        """
        if self.whole and end < self.num_prompt_tokens:
            return self.computed
        if self.cuts_media:
            return end
        for medium in self.request.prompt.media:
            if not medium.embeddings and medium.start < end < medium.end:
                return medium.start
        return end

    @property
    def least_chunk(self) -> int:
        """The fewest tokens that a step can run of it next: one, or all of a prompt or a medium that is not cut."""
        start = self.computed
        if self.whole and start < self.num_prompt_tokens:
            return self.num_prompt_tokens - start
        if not self.cuts_media:
            for medium in self.request.prompt.media:
                if not medium.embeddings and medium.start <= start < medium.end:
                    return medium.end - start
        return 1

    def prefix_end(self, end: int, block_size: int) -> int:
        """The last block boundary up to `end` at which a cached prefix may end: within no medium."""
        end -= end % block_size
        while (start := self.boundary(end)) < end:
            end = start - start % block_size
        return end

    def chunk(self, limit: int) -> int:
        """Number of tokens that one step runs of this sequence, at most `limit`."""
        start, returned = self.computed, self.num_prompt_logprobs
        if start < returned < self.num_prompt_tokens - 1:
            # These prompt log probabilities were returned before a preemption: recompute in a chunk without them.
            limit = min(limit, returned - start)
        return self.boundary(start + limit) - start

    def name_blocks(self, block_size: int) -> None:
        """Name its full blocks of known tokens in `block_names`."""
        name_blocks(self.block_names, self.token_ids, block_size, self.block_keys)

    def block_keys(self, index: int, block_size: int) -> bytes:
        """Everything that names of blocks must depend on, beside tokens and the block before; empty for nothing."""
        keys = self.request.prompt.block_keys(index, block_size)
        if index == 0 and self.namespace:
            keys.append(("namespace", self.namespace))
        if index == 0 and self.is_long:
            keys.append(LONG)
        if index == 0 and self.weights.key:
            keys.append(("weights", self.weights.key))
        return encoded_keys(keys)

    def timing(self, now: float) -> RequestTiming:
        """The timing to report, with `now` as the end."""
        return RequestTiming(self.arrival_time, self.scheduled_time, self.first_token_time, now)


def sequence_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` of a request: its own for the first, a mix of both for the others.

    splitmix64's finaliser (Steele, Lea and Flood 2014), as a signed 64-bit integer.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    z = (seed + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def sequences(
    request: Request,
    client: bytes,
    arrival: int,
    now: float,
    *,
    max_model_len: int,
    share_prefixes: bool,
    tenant: Tenant,
    whole: bool = False,
    cuts_media: bool = False,
    short_length: int = 0,
) -> list[Sequence]:
    """The n sequences of a submitted request, with `arrival`, `arrival` + 1, ... as their order of arrival.

    Without `share_prefixes` each request gets a namespace of its own, so that only its own n sequences share the
    prompt. tenant: whose request it is. whole: prompts run in one step.
    cuts_media: a step may compute a part of a medium.
    short_length: of the engine, see `Ready`.
    """
    prompt, task = request.prompt.token_ids, request.task
    namespace = b"" if share_prefixes else b"%b|%d" % (client, arrival)
    limit = max_model_len - len(prompt)
    if isinstance(task, PoolingParams):
        n, max_output = 1, 0
    else:
        n, max_output = task.n, min(task.max_tokens or limit, limit)
    done = request.output_token_ids or [[] for _ in range(n)]
    return [
        Sequence(
            client=client,
            request=request,
            index=index,
            seed=sequence_seed(request.seed, index),
            arrival=arrival + index,
            arrival_time=now - request.age,
            token_ids=[*prompt, *done[index]],
            num_prompt_tokens=len(prompt),
            max_output=max_output,
            tenant=tenant,
            turn=tenant.turn(request.rank),
            namespace=namespace,
            whole=whole,
            cuts_media=cuts_media,
            angles_end=short_length or sys.maxsize,
            num_prompt_logprobs=request.num_prompt_logprobs if index == 0 else 0,
            versions=[(len(done[index]), "")] if done[index] else [],
        )
        for index in range(n)
    ]
