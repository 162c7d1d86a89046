"""The state of one sequence in the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pagewire.engine_core.grammar.matcher import Matcher
from pagewire.engine_core.schedule.blocks import Block
from pagewire.ipc.messages import Request, RequestTiming
from pagewire.ipc.params import SamplingParams


class State(Enum):
    """Scheduling state of a sequence: in the queue, in a slot, or ended."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One of the n sequences of a request.

        token_ids   [ prompt ............ | output ........ ]
        computed     ------------------------------->           KV written, or launched
        num_pending                                        ++   sampled in flight, not yet known

    client: the frontend's identity. key: of the request, chosen by the frontend. index: 0 to n - 1.
    arrival: position in the order of arrival. max_output: maximum number of output tokens.
    num_in_flight: steps in flight that run this sequence.
    num_crashes: worker crashes with this sequence in flight, since its last token.
    namespace: prefixes are shared within a namespace only (it holds the cache salt).
    num_cached_tokens: tokens found in the prefix cache on first admission; None before that.
    token_gap: seconds between the last two tokens; 0 until there are two.
    matcher: its position in the grammar of its structured output; None without one.

    Times are in seconds on the monotonic clock, 0 until they are known.
    """

    client: bytes
    key: int
    index: int
    request_id: str
    params: SamplingParams
    seed: int
    eos_token_id: int | None
    priority: int
    arrival: int
    arrival_time: float
    token_ids: list[int]
    num_prompt_tokens: int
    max_output: int
    namespace: bytes = b""
    matcher: Matcher | None = None

    state: State = State.WAITING
    computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    num_crashes: int = 0
    slot: int = -1
    blocks: list[Block] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    num_registered: int = 0
    num_cached_tokens: int | None = None
    num_prompt_logprobs: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    token_gap: float = 0.0

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
        """Number of tokens whose KV is still to be computed; 0 if the last output token is already in flight."""
        if self.num_output_tokens + self.num_pending >= self.max_output:
            return 0
        return len(self.token_ids) + self.num_pending - self.computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if prompt log probabilities are requested. Only the first of n sequences returns them."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def finished(self) -> bool:
        """True if the sequence has ended."""
        return self.state is State.FINISHED

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
    submitted: Request,
    client: bytes,
    arrival: int,
    now: float,
    *,
    max_model_len: int,
    share_prefixes: bool,
) -> list[Sequence]:
    """The n sequences of a submitted request, with `arrival`, `arrival` + 1, ... as their order of arrival.

    Without `share_prefixes` each request gets a namespace of its own, so that only its own n sequences share the
    prompt.
    """
    prompt, params = submitted.prompt_token_ids, submitted.params
    namespace = (submitted.cache_salt or "").encode()
    if not share_prefixes:
        namespace += b"|%b|%d" % (client, arrival)
    limit = max_model_len - len(prompt)
    done = submitted.output_token_ids or [[] for _ in range(params.n)]
    return [
        Sequence(
            client=client,
            key=submitted.key,
            index=index,
            request_id=submitted.request_id,
            params=params,
            seed=sequence_seed(submitted.seed, index),
            eos_token_id=submitted.eos_token_id,
            priority=submitted.priority,
            arrival=arrival + index,
            arrival_time=now,
            token_ids=[*prompt, *done[index]],
            num_prompt_tokens=len(prompt),
            max_output=min(params.max_tokens or limit, limit),
            namespace=namespace,
            num_prompt_logprobs=submitted.num_prompt_logprobs if index == 0 else 0,
        )
        for index in range(params.n)
    ]
