"""A scheduler with a worker that knows nothing but what plans tell it, and checks all that they imply.

The worker's "model" is a chain: the KV of a position is a number made of the token there (or of the medium that
takes its place), everything before it, and the request's world (what its cache salt and its adapter set apart, and
whether it is a long sequence). A
row that reads a block that was shared, reused or read wrongly gets another number. The token drawn is a function of
that number and the seed, and a pooled result is such a number or the sum of all, so `expected` and
`expected_pooled` compute a sequence's result without any scheduling.
"""

from __future__ import annotations

import functools
import struct
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any
from zlib import crc32

from llguidance import LLTokenizer, TokenizerWrapper

from pagewire.engine_core.drafting.draft import TextDrafter
from pagewire.engine_core.drafting.drafting import Drafting, DraftLimits
from pagewire.engine_core.drafting.ngram import NgramDrafter
from pagewire.engine_core.drafting.suffix import History, SuffixDrafter
from pagewire.engine_core.grammar.compile import compile_grammar
from pagewire.engine_core.grammar.matcher import Grammar, Matcher
from pagewire.engine_core.media.encoder_cache import EncoderCache
from pagewire.engine_core.media.features import Features
from pagewire.engine_core.schedule.blocks import Block, BlockPool
from pagewire.engine_core.schedule.cold import ColdPrefixes
from pagewire.engine_core.schedule.retained import RetainedPrefixes
from pagewire.engine_core.schedule.scheduler import (
    Scheduler,
    SchedulerConfig,
)
from pagewire.engine_core.schedule.sequence import Sequence, State, sequences
from pagewire.engine_core.schedule.speculation import NoSpeculation, Speculation
from pagewire.engine_core.schedule.step import Outcome
from pagewire.engine_core.schedule.step_time import awaits_token
from pagewire.engine_core.schedule.turns import Order
from pagewire.engine_core.states.state_slots import CHECKPOINT_TOKENS, StateSlots
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.handover import PATIENCE_SECONDS
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.suspicion import NO_SUSPICION, SEQUENCE_RULE
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import NOTHING, LogprobRows, Media, Prompt, Retention, Task
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request, TokenDelta
from pagewire.ipc.wire.steps import Encode, Masks, Row, RowResult, SlotInit, StepPlan, StepResult

EOS = 0
STOP = 1
VOCAB = 12


def extend(digest: int, token_id: int) -> int:
    """The KV behind `token_id`, where `digest` is the KV before it."""
    return hash((digest, token_id))


def draw(
    digest: int,
    seed: int,
    num_output: int,
    min_tokens: int,
    stop_ids: Collection[int],
    mask: bytes | None = None,
) -> int | None:
    """The token that follows; None if there is none. mask: what a grammar allows."""
    banned = stop_ids if num_output < min_tokens else ()
    choices = [token_id for token_id in range(VOCAB) if token_id not in banned]
    if mask is not None:
        choices = [token_id for token_id in choices if mask[token_id // 8] >> token_id % 8 & 1]
    return choices[hash((digest, seed)) % len(choices)] if choices else None


@functools.cache
def tokenizer() -> LLTokenizer:
    """The end of sequence, and a letter for every other token: "a" is `STOP`."""
    tokens = [b"<eos>", *(bytes([ord("a") + i]) for i in range(VOCAB - 1))]

    class Letters(SimpleNamespace):
        def __call__(self, text: bytes) -> list[int]:
            return [byte - ord("a") + 1 for byte in text]

    letters = Letters(eos_token_id=EOS, bos_token_id=None, tokens=tokens, special_token_ids=[EOS])
    return LLTokenizer(TokenizerWrapper(letters), n_vocab=VOCAB)


@functools.cache
def grammar(regex: str) -> Grammar:
    """A regular expression over the letters."""
    return compile_grammar(StructuredOutputsParams(regex=regex), tokenizer(), VOCAB)


def matcher_of(params: SamplingParams, token_ids: Collection[int] = ()) -> Matcher | None:
    """The state of a sequence with this output."""
    structure = params.structured_outputs
    if structure is None:
        return None
    return grammar(structure.regex or "").matcher(token_ids, params.ignore_eos)


MAX_SHORT = 63


def short_length(task: Task, seed: int) -> int:
    """The most tokens of a short sequence in a request's world; 0: all sequences are alike."""
    return world_number(task, seed) & MAX_SHORT


def world_number(task: Task, seed: int) -> int:
    """The number of a request's world. Pooling has no parameter to say it in, and needs no seed."""
    return int((task.extra_args or {})["world"]) if isinstance(task, SamplingParams) else seed


def world(task: Task, seed: int, num_tokens: int) -> int:
    """The first link of a sequence's chain of block names, by its number of tokens."""
    return hash((world_number(task, seed), 0 < short_length(task, seed) < num_tokens))


def chain(begin: int, token_ids: Iterable[int], media: Collection[Media] = ()) -> list[int]:
    """The KV of each position."""
    names = {m.start + i: hash((crc32(m.name), i)) for m in media for i in range(m.num_tokens)}
    digests = []
    for position, token_id in enumerate(token_ids):
        begin = extend(begin, names.get(position, token_id))
        digests.append(begin)
    return digests


@dataclass
class Slot:
    """What a worker knows of a sequence: tokens, the KV each of them must have, and blocks."""

    init: SlotInit
    tokens: list[int] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    pooled: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.init.token_ids)
        begin = world(self.task, self.init.seed, len(self.tokens))
        self.digests = chain(begin, self.tokens, self.init.media)
        short = short_length(self.task, self.init.seed)
        self.end = short if len(self.tokens) <= short else sys.maxsize

    @property
    def task(self) -> Task:
        assert not isinstance(self.init.task, int), "the scheduler gives each init its task"
        return self.init.task

    def append(self, token_id: int) -> None:
        self.digests.append(extend(self.digests[-1], token_id))
        self.tokens.append(token_id)

    def digests_with(self, drafts: list[int]) -> list[int]:
        """The KV that each position has with drafts behind the tokens."""
        return [*self.digests, *chain(self.digests[-1], drafts)]

    def draw(self, digest: int, num_ahead: int, mask: bytes | None) -> int | None:
        """The token behind `digest`, which is `num_ahead` drafts ahead of the tokens."""
        init, params = self.init, self.task
        assert isinstance(params, SamplingParams)
        num_output = len(self.tokens) - init.num_prompt_tokens + num_ahead
        return draw(digest, init.seed, num_output, params.min_tokens, init.stop_ids, mask)


class ModelWorker:
    """Runs plans in order: frees slots, fills slots, writes the KV and the states of all rows, then reads KV.

    The states behind a token are the number that its KV is.

    stages: of a pipeline. Then the first stage knows of a slot's tokens only what plans say of them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        stages: int = 1,
        num_states: int = 0,
        encoder_capacity: int = 0,
        encoder_layers: int = 0,
        cuts_media: bool = False,
    ) -> None:
        self.block_size, self.stages = block_size, stages
        self.encoder_capacity, self.cuts_media = encoder_capacity, cuts_media
        self.encoder_layers = encoder_layers
        self.entries: dict[int, tuple[bytes, int]] = {}  # name and size of media, by entry
        self.begun: dict[int, tuple[tuple[bytes, int], int]] = {}  # media whose pass has stopped, and where
        self.layer_seconds = 0.0  # what a layer takes for each embedding; 0: anything
        self.states: list[int | None] = [None] * num_states
        self.random = Random(num_blocks)
        self.step_us = 0  # what a step takes; 0: anything, and launches end at any step
        self.seconds_of: Callable[[StepPlan], float] | None = (
            None  # what a plan takes, where that depends on it
        )
        self.sent: dict[int, list[int]] = {}
        self.kv: list[int | None] = [None] * (num_blocks * block_size)
        self.slots: dict[int, Slot] = {}

    def run(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        assert (masks is not None) == plan.masked
        allowed = {} if masks is None else dict(zip(masks.samples, masks_of(masks), strict=True))
        for number in plan.freed_slots:
            self.slots.pop(number, None)
        for init in plan.inits:
            assert init.slot not in self.slots, f"slot {init.slot} is taken"
            self.slots[init.slot] = Slot(init, block_ids=list(init.block_ids))
            self.sent[init.slot] = list(init.token_ids)
        num_encoded = self._encode(plan)
        self._check_states_are_apart(plan)
        for row in plan.rows:
            self._check_first_stage(row)
            self._write(row)
            self._write_states(row)
        result = StepResult(plan.step_id, [])
        num_samples = 0
        for row in plan.rows:
            here = [allowed.get(num_samples + i) for i in range(row.num_samples)]
            num_samples += row.num_samples
            result.rows.append(self._read(row, here))
        self._go_on(plan, result)
        if num_encoded:
            random_us = self.random.randint(1, 4000)
            result.encode_us = round(self.layer_seconds * num_encoded * 1e6) or random_us
        return result

    def _go_on(self, plan: StepPlan, result: StepResult) -> None:
        """Run the further steps of a plan for several, or some: anything may end it."""
        result.busy_us = self.step_us or self.random.randint(1, 4000)
        if self.seconds_of is not None:
            result.busy_us = round(self.seconds_of(plan) * 1e6)
        for number in range(1, plan.num_steps):
            ends = [self.slots[row.slot].init.stop_ids for row in plan.rows]
            if any(own.token_ids[-1] in ids for own, ids in zip(result.rows, ends, strict=True)):
                return
            if not self.step_us and not self.random.randrange(6):
                return
            result.busy_us += self.step_us
            rows = [Row(row.slot, row.start + number, 1, num_samples=1) for row in plan.rows]
            for row in rows:
                self._write(row)
            for row, own in zip(rows, result.rows, strict=True):
                own.token_ids += self._read(row, [None]).token_ids
                own.logprobs = logprob_rows(own.token_ids)

    def _encode(self, plan: StepPlan) -> int:
        """What is kept fits its room, and has each medium once. Returns embeddings times layers."""
        for entry in plan.freed_entries:
            assert (entry in self.entries) != (entry in self.begun)
            self.entries.pop(entry, None)
            self.begun.pop(entry, None)
        num_encoded = sum(self._run_pass(encode) for encode in plan.encodes)
        kept = [*self.entries.values(), *(medium for medium, _ in self.begun.values())]
        assert sum(size for _, size in kept) <= self.encoder_capacity
        assert len({name for name, _ in kept}) == len(kept), "a medium is kept twice"
        assert len(self.begun) <= 1
        return num_encoded

    def _run_pass(self, encode: Encode) -> int:
        """Run a pass, or a slice of it: a pass begins with features, and goes on without."""
        assert encode.entry not in self.entries
        if encode.features:
            assert encode.entry not in self.begun
            (tensor,) = encode.features.values()
            medium, begin = (bytes(tensor.data), tensor.shape[0]), 0
        else:
            medium, begin = self.begun.pop(encode.entry)
        if encode.until:
            assert begin < encode.until < self.encoder_layers
            self.begun[encode.entry] = medium, encode.until
        else:
            self.entries[encode.entry] = medium
        return medium[1] * ((encode.until or self.encoder_layers) - begin)

    def _check_entries(self, row: Row, media: Collection[Media]) -> None:
        """A row names the entries of the media that it runs tokens of, and they are there."""
        if not self.encoder_capacity:
            return
        here = [
            m
            for m in media
            if not m.embeddings and m.start < row.start + row.num_tokens and m.end > row.start
        ]
        assert [(start, end) for start, end, _ in row.entries] == [(m.start, m.end) for m in here]
        for medium, (_, _, entry) in zip(here, row.entries, strict=True):
            assert self.entries[entry][0] == medium.name

    def _check_first_stage(self, row: Row) -> None:
        if self.stages == 1:
            assert not row.token_ids
            return
        sent, tokens = self.sent[row.slot], self.slots[row.slot].tokens
        sent += row.token_ids
        assert sent == tokens, f"{row} does not say which tokens it runs"

    def _write(self, row: Row) -> None:
        slot = self.slots[row.slot]
        slot.block_ids += row.new_block_ids
        end = row.start + row.num_tokens
        digests = slot.digests_with(row.drafts)
        assert row.num_tokens > 0 and end <= len(digests), f"{row} runs tokens that are not there"
        assert not row.drafts or end == len(digests), f"{row} has drafts that are not its last tokens"
        assert end <= len(slot.block_ids) * self.block_size, f"{row} runs past its blocks"
        assert end <= slot.end, f"{row} runs past the end of a short sequence"
        for m in slot.init.media:
            if m.embeddings or self.cuts_media:
                continue
            assert not m.start < row.start < m.start + m.num_tokens, f"{row} begins within {m}"
            assert not m.start < end < m.start + m.num_tokens, f"{row} ends within {m}"
        check_embeddings(row, slot.init.media)
        self._check_entries(row, slot.init.media)
        for position in range(row.start, end):
            self.kv[self._cell(slot, position)] = digests[position]

    def _check_states_are_apart(self, plan: StepPlan) -> None:
        """What a row writes no other one touches: all rows run at the same time."""
        writers = Counter(slot for row in plan.rows for slot in {slot for _, slot in row.states})
        for row in plan.rows:
            own = {slot for _, slot in row.states}
            assert all(writers[slot] == 1 for slot in own), f"{row} writes what another row writes"
            assert row.state in own or not writers[row.state], f"{row} reads what another row writes"

    def _write_states(self, row: Row) -> None:
        """Go on from the states that the row reads, which must be those of its own prefix."""
        if not self.states:
            assert not row.states and row.state == -1
            return
        slot, end = self.slots[row.slot], row.start + row.num_tokens
        digests = slot.digests_with(row.drafts)
        if row.start:
            assert self.states[row.state] == digests[row.start - 1], f"{row} reads states of other tokens"
        else:
            assert row.state == -1
        ends = [place for place, _ in row.states]
        assert ends == sorted(set(ends)) and ends[0] > row.start and ends[-1] == end, f"{row} ends elsewhere"
        for place, number in row.states:
            self.states[number] = digests[place - 1]

    def _read(self, row: Row, masks: list[bytes | None]) -> RowResult:
        slot = self.slots[row.slot]
        end = row.start + row.num_tokens
        digests = slot.digests_with(row.drafts)
        stored = [self.kv[self._cell(slot, position)] for position in range(end)]
        assert stored == digests[:end], f"{row} reads KV that is not its own"
        result = RowResult()
        if row.pool:
            assert not row.num_samples
            slot.pooled |= {position: digests[position] for position in range(row.start, end)}
            if end == slot.init.num_prompt_tokens:
                result.pooled = pooled_result(slot.task, slot.pooled, end)
            return result
        assert row.num_samples == (1 + len(row.drafts) if end == len(digests) else 0), (
            f"{row} of {len(digests)}"
        )
        assert row.num_drafts >= 0 and (row.num_samples or not row.num_drafts)
        if row.num_prompt_logprobs:
            first = row.start + 1
            result.prompt_logprobs = logprob_rows(slot.tokens[first : first + row.num_prompt_logprobs])
        if row.num_samples:
            self._sample(slot, row, digests[end - row.num_samples : end], masks, result)
        if result.token_ids and row.num_drafts:
            result.drafts = self._propose(slot, row.num_drafts)
        return result

    def _propose(self, slot: Slot, limit: int) -> list[int]:
        """As a drafter's model would: what comes next, now and then something else, and not always as many."""
        digest, drafts = slot.digests[-1], list[int]()
        for i in range(self.random.randint(0, limit)):
            token_id = slot.draw(digest, i, None)
            if token_id is None or not self.random.randrange(4):
                token_id = self.random.randrange(VOCAB)
            drafts.append(token_id)
            digest = extend(digest, token_id)
        return drafts

    def _sample(
        self, slot: Slot, row: Row, digests: list[int], masks: list[bytes | None], result: RowResult
    ) -> None:
        """Sample behind each of `digests`, as long as the drafts agree, into `result`."""
        for i, (digest, mask) in enumerate(zip(digests, masks, strict=True)):
            token_id = slot.draw(digest, i, mask)
            if token_id is None:
                if not i:
                    result.error = "nothing is allowed"
                break
            result.token_ids.append(token_id)
            if i < len(row.drafts) and row.drafts[i] != token_id:
                break
        for token_id in result.token_ids:
            slot.append(token_id)
        result.logprobs = logprob_rows(result.token_ids)

    def _cell(self, slot: Slot, position: int) -> int:
        return slot.block_ids[position // self.block_size] * self.block_size + position % self.block_size


def check_embeddings(row: Row, media: Collection[Media]) -> None:
    """A row brings the embeddings of its own positions, and no others."""
    here = {
        position: (m.name, position - m.start)
        for m in media
        if m.embeddings
        for position in range(max(m.start, row.start), min(m.end, row.start + row.num_tokens))
    }
    brought: dict[int, tuple[bytes, int]] = {}
    for m in row.media:
        assert m.data.shape == (m.num_tokens, 1)
        rows = struct.unpack(f"{m.num_tokens}e", m.data.data)
        brought |= {m.start + i: (m.name, int(value)) for i, value in enumerate(rows)}
    assert brought == here, f"{row} brings {brought}, not {here}"


def features_of(medium: Media) -> Features:
    """Features from which the worker knows the medium."""
    size = len(medium.name)
    tensor = Tensor("uint8", (size,), medium.name)
    return Features(medium.name, "image", array("i"), size, {"name": tensor}, NOTHING)


def begins_medium(sequence: Sequence) -> bool:
    """True if a sequence goes on with a picture, which may have to wait to be encoded."""
    return any(m.start <= sequence.computed < m.end for m in sequence.request.prompt.encoded)


def masks_of(masks: Masks) -> list[bytes]:
    """The mask of each of `masks.samples`."""
    data, width = bytes(masks.bits.data), 4 * masks.bits.shape[1]
    return [data[i * width : (i + 1) * width] for i in range(len(masks.samples))]


def pooled_result(task: Task, digests: dict[int, int], num_tokens: int) -> Tensor:
    """The last token's digest, or the sum of all, of which none may be missing."""
    assert isinstance(task, PoolingParams)
    total = sum(digests[i] for i in range(num_tokens)) if task.all_tokens else digests[num_tokens - 1]
    return Tensor("int64", (1,), (total % 2**63).to_bytes(8, "little"))


def logprob_rows(token_ids: list[int]) -> LogprobRows:
    """Log probabilities that tell nothing but which tokens they are of."""
    n = len(token_ids)
    ones = array("i", [1] * n).tobytes()
    return LogprobRows(
        Tensor("int32", (n, 1), array("i", token_ids).tobytes()),
        Tensor("float32", (n, 1), array("f", [0.0] * n).tobytes()),
        Tensor("int32", (n,), ones),
    )


def prompt_digests(sequence: Sequence) -> list[int]:
    """The KV of a sequence's prompt."""
    prompt = sequence.request.prompt
    begin = world(sequence.request.task, sequence.seed, len(prompt.token_ids))
    return chain(begin, prompt.token_ids, prompt.media)


def expected_pooled(sequence: Sequence) -> Tensor:
    """The result of a sequence that pools, and runs alone."""
    digests = dict(enumerate(prompt_digests(sequence)))
    return pooled_result(sequence.request.task, digests, len(digests))


def expected(sequence: Sequence) -> tuple[list[int], str, int | None]:
    """Output tokens, finish reason and stop reason of a request that runs alone, one token at a time."""
    params, eos_token_id = sequence.params, sequence.request.eos_token_id
    digest = prompt_digests(sequence)[-1]
    stops = list(params.stop_token_ids or [])
    if eos_token_id is not None and not params.ignore_eos:
        stops.append(eos_token_id)
    matcher = matcher_of(params)
    banned = stops + ([EOS] if matcher is not None and not params.ignore_eos else [])
    output: list[int] = []
    while True:
        mask = None if matcher is None else matcher.mask()
        token_id = draw(digest, sequence.seed, len(output), params.min_tokens, banned, mask)
        if token_id is None:
            return output, "error", None
        output.append(token_id)
        if matcher is not None:
            matcher.accept(token_id)
        length = sequence.num_prompt_tokens + len(output)
        digest = extend(digest, token_id)
        if length == 1 + short_length(params, sequence.seed) > 1:
            begin, prompt = world(params, sequence.seed, length), sequence.request.prompt
            digest = chain(begin, [*prompt.token_ids, *output], prompt.media)[-1]
        if token_id in stops and len(output) >= params.min_tokens:
            is_eos = token_id == eos_token_id and not params.ignore_eos
            return output, "stop", None if is_eos else token_id
        if matcher is not None and matcher.complete:
            return output, "stop", None
        if len(output) == sequence.max_output:
            return output, "length", None


class Forced(NoSpeculation):
    """Drafts whether they pay or not: those of `propose`, for each sequence all of whose tokens are known."""

    drafts = True

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        raise NotImplementedError

    def choose(
        self, running: Collection[Sequence], num_waiting: int, budget: int, *, ahead: bool
    ) -> dict[Sequence, list[int]]:
        chosen = {}
        for sequence in running:
            limit = min(budget - 1, sequence.max_output - sequence.num_output_tokens - 1)
            if sequence.decodes and not sequence.num_pending and not sequence.pools and limit > 0:
                chosen[sequence] = self.propose(sequence, limit)[:limit]
        return chosen


class RandomPolicy:
    """Lengths that follow nothing."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def lengths(self, num_rows: int, reaches: Iterable[list[float]], room: int) -> list[int]:
        lengths = []
        for reach in reaches:
            lengths.append(self._random.randint(0, max(0, min(len(reach), room))))
            room -= lengths[-1]
        return lengths

    def hopeless(self, num_rows: int, room: int) -> bool:
        return not self._random.randrange(4)

    def observe(self, *_: object, **__: object) -> None:
        """It does not learn."""

    def seconds(self, num_tokens: int) -> float:
        return 0.0


def drafting(kind: str, seed: int, longest: int = 5, *, pipelined: bool = False) -> Speculation:
    """A source of drafts of random lengths. pipelined: for several stages.

    kind: "random" (right up to a random place), "ngram", "suffix", or "worker" (proposed by the simulated worker).
    """
    if kind == "random":
        return RandomDrafter(seed, longest)
    drafter: TextDrafter | None = None
    if kind != "worker":
        drafter = NgramDrafter(1, 3) if kind == "ngram" else SuffixDrafter(History(40))
    return Drafting(DraftLimits(longest), drafter, RandomPolicy(seed), pipelined=pipelined)


class RandomDrafter(Forced):
    """Proposes the true continuation of a sequence up to a random place, and other tokens behind it."""

    def __init__(self, seed: int, longest: int) -> None:
        super().__init__()
        self._random, self._longest = Random(seed), longest

    def waits(self, *_: object) -> bool:
        """Now and then."""
        return not self._random.randrange(3)

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        count = self._random.randint(0, min(limit, self._longest))
        true = expected(sequence)[0][sequence.num_output_tokens :][: self._random.randint(0, count)]
        return [*true, *(self._random.randrange(VOCAB) for _ in range(count - len(true)))]


@dataclass
class Stream:
    """What was heard of one sequence."""

    tokens: list[int] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    num_crashes: int = 0
    num_relapses: int = 0
    aborted: bool = False

    @property
    def is_guilty(self) -> bool:
        """Another crash is one too many."""
        return (
            self.num_crashes >= SEQUENCE_RULE.guilty_in_row
            or self.num_relapses >= SEQUENCE_RULE.guilty_in_all
        )

    @property
    def last(self) -> TokenDelta | None:
        return self.deltas[-1] if self.deltas else None

    @property
    def ended(self) -> bool:
        return self.aborted or (self.last is not None and self.last.finish_reason is not None)


class Simulation:
    """Scheduler and worker under one clock. Every event is followed by all checks that apply."""

    def __init__(
        self,
        *,
        share_prefixes: bool = True,
        drafter: Speculation | None = None,
        short_length: int = 0,
        cuts_media: bool = False,
        cold: ColdPrefixes | None = None,
        num_states: int = 0,
        checkpoint_tokens: int = CHECKPOINT_TOKENS,
        encoder_capacity: int = 0,
        encoder_layers: int = 0,
        retained: RetainedPrefixes | None = None,
        **config: Any,
    ) -> None:
        self.config = SchedulerConfig(**{"max_model_len": 32, "num_blocks": 16, "block_size": 4, **config})
        self.share_prefixes, self.short_length, self.cuts_media = share_prefixes, short_length, cuts_media
        size, budget = self.config.block_size, self.config.max_num_batched_tokens
        self.states = StateSlots(num_states, size, checkpoint_tokens) if num_states else None
        self.encoder_layers = encoder_layers
        self.encoder = EncoderCache(encoder_capacity, budget, encoder_layers) if encoder_capacity else None
        groups = [group for group in (self.states, self.encoder) if group is not None]
        waiting = WaitingQueue(self.config.policy, Accounts(1 << 30))
        self.scheduler = Scheduler(self.config, waiting, drafter, cold, groups, retained)
        self.worker = self._new_worker()
        self.plans: deque[StepPlan] = deque()
        self.results: deque[StepResult] = deque()
        self.streams: dict[Sequence, Stream] = {}
        self.num_added = 0
        self.now = 0.0

    # ------------------------------------------------------------ events

    def submit(
        self,
        prompt: Collection[int],
        *,
        seed: int = 7,
        priority: int = 0,
        salt: str | None = None,
        adapter: bytes = b"",
        media: Collection[Media] = (),
        eos: int | None = None,
        done: list[list[int]] | None = None,
        num_prompt_logprobs: int = 0,
        pool: PoolingParams | None = None,
        tenant: str = "",
        rank: int = 0,
        retention: Collection[Retention] = (),
        **params: Any,
    ) -> list[Sequence]:
        """Add a request; by default nothing but its length ends it."""
        number = crc32(repr((salt, adapter, self.share_prefixes or self.num_added)).encode())
        number = number * (MAX_SHORT + 1) + self.short_length
        params = {"max_tokens": 4, "temperature": 0.0, "extra_args": {"world": number}, **params}
        submitted = Request(
            key=self.num_added,
            request_id=f"r{self.num_added}",
            prompt=Prompt(list(prompt), list(media), adapter, salt),
            task=pool or SamplingParams(**params),
            seed=number if pool else seed,
            eos_token_id=eos,
            priority=priority,
            output_token_ids=done,
            num_prompt_logprobs=num_prompt_logprobs,
            rank=rank,
            tenant=tenant,
            retention=list(retention),
        )
        group = sequences(
            submitted,
            b"client",
            self.num_added,
            self._tick(),
            max_model_len=self.config.max_model_len,
            share_prefixes=self.share_prefixes,
            short_length=self.short_length,
            cuts_media=self.cuts_media,
            tenant=self.scheduler.waiting.tenants.get(tenant or b"client"),
        )
        self.num_added += len(group)
        for sequence in group:
            if not sequence.pools:
                sequence.matcher = matcher_of(sequence.params, sequence.output_token_ids)
            if self.encoder is not None:
                sequence.features = [features_of(medium) for medium in submitted.prompt.encoded]
            stream = self.streams[sequence] = Stream(sequence.token_ids[sequence.num_prompt_tokens :])
            if sequence.returns_prompt_logprobs:
                stream.prompt_logprobs = list(prompt)[1 : 1 + num_prompt_logprobs]
            self.scheduler.add(sequence)
        self.check()
        return group

    def plan(self) -> StepPlan | None:
        """Plan a step and, ahead of what the scheduler knows, run it."""
        before = Snapshot.of(self.scheduler, self.live())
        plan = self.scheduler.plan(self._tick())
        if plan is None:
            assert self.scheduler.in_flight or not self.scheduler.num_unfinished, "nothing will ever run"
        else:
            before.check(self.scheduler, plan, self.now)
            self.plans.append(plan)
            self._run_worker()
        self.check()
        return plan

    def _run_worker(self) -> None:
        """Run what is planned, but for a masked step not before its masks can be made: when it is the oldest."""
        while self.plans and self._run_worker_once():
            pass

    def _run_worker_once(self) -> bool:
        """Run the oldest plan that is not run; False if its masks cannot be made yet."""
        if self.plans[0].masked and len(self.plans) != len(self.scheduler.in_flight):
            return False
        plan, masks = self.plans.popleft(), None
        if plan.masked:
            masks, outcomes = self.scheduler.masks(self._tick())
            assert masks is not None and masks.step_id == plan.step_id
            self._hear(outcomes)
        self.results.append(self.worker.run(plan, masks))
        return True

    def commit(self, errors: dict[int, str] | None = None) -> list[Outcome]:
        """Return the oldest step's result."""
        result = self.results.popleft()
        for index, error in (errors or {}).items():
            result.rows[index] = RowResult(error=error)
        if self.worker.random.randrange(4):
            result = result.by_columns()
        outcomes = list(self.scheduler.commit(result, self._tick()))
        self._hear(outcomes)
        self._run_worker()
        return outcomes

    def fail(self) -> list[Outcome]:
        """The worker dies, and another one comes."""
        for sequence in {r for step in self.scheduler.in_flight for r in step.owners}:
            self.streams[sequence].num_crashes += 1
            self.streams[sequence].num_relapses += 1
        self.worker = self._new_worker()
        self.plans.clear()
        self.results.clear()
        outcomes = self.scheduler.fail(self._tick())
        guilty = {r for r in self.live() if self.streams[r].is_guilty}
        assert {sequence for sequence, _ in outcomes} == guilty
        self._hear(outcomes)
        return outcomes

    def abort(self, sequences: Iterable[Sequence]) -> None:
        sequences = list(sequences)
        self.scheduler.abort(sequences)
        for sequence in sequences:
            self.streams[sequence].aborted = True
        self.check()

    def preempt_all(self) -> bool:
        done = self.scheduler.preempt_all()
        assert done == (not self.scheduler.in_flight)
        self.check()
        return done

    def reset_prefix_cache(self) -> bool:
        done = self.scheduler.reset_prefix_cache()
        assert done == (not self.scheduler.running)
        assert not done or not any(pool.named for pool in self.pools())
        self.check()
        return done

    def step(self) -> StepPlan | None:
        """Plan as far ahead as depth allows, then commit one step. The first plan made."""
        first = None
        while len(self.scheduler.in_flight) < self.config.depth and (plan := self.plan()) is not None:
            first = first or plan
        if self.results:
            self.commit()
        return first

    def drain(self, limit: int = 3000) -> None:
        """Run until nothing is left, and see that everything came back."""
        for _ in range(limit):
            if not self.scheduler.num_unfinished and not self.results:
                break
            self.step()
        else:
            raise AssertionError(f"{self.scheduler.num_unfinished} sequences do not end")
        for pool in self.pools():
            assert pool.num_free + len(self._others(pool)) == len(pool)
        if self.encoder is not None:
            assert all(entry.num_refs == 0 for entry in self.encoder._entries.values())
            assert not self.encoder._held
        assert self.scheduler.sequences.num_waiting == 0 and not self.scheduler.running
        assert all(stream.ended for stream in self.streams.values())

    # ------------------------------------------------------------ views

    def live(self) -> list[Sequence]:
        """Requests that have not ended."""
        return [sequence for sequence, stream in self.streams.items() if not stream.ended]

    def pools(self) -> list[BlockPool]:
        """Those of all cache groups."""
        return [self.scheduler.kv.pool, *([] if self.states is None else [self.states.pool])]

    def slots_of(self, plan: StepPlan | None) -> list[int]:
        return [] if plan is None else [row.slot for row in plan.rows]

    def block_ids(self, sequence: Sequence) -> list[int]:
        return [block.block_id for block in sequence.blocks]

    def output(self, sequence: Sequence) -> list[int]:
        return self.streams[sequence].tokens

    def finish_reason(self, sequence: Sequence) -> str | None:
        last = self.streams[sequence].last
        return last.finish_reason if last else None

    # ------------------------------------------------------------ checks

    def check(self) -> None:
        """Everything that must hold between events."""
        self._check_pool(self.scheduler.kv.pool, lambda sequence: sequence.blocks)
        if self.states is not None:
            self._check_pool(self.states.pool, functools.partial(state_slots, self.states))
        if self.encoder is not None:
            begun = [entry for entry in self.encoder._entries.values() if not entry.is_whole]
            assert begun == [entry for entry in [self.encoder._begun] if entry is not None]
        self._check_requests()

    def _check_pool(self, pool: BlockPool, held: Callable[[Sequence], list[Block]]) -> None:
        users = Counter(block.block_id for sequence in self.streams for block in held(sequence))
        users += self._others(pool)
        assert [users[block.block_id] for block in pool.blocks] == [block.num_refs for block in pool.blocks]
        free = list(pool.free_order())
        assert sorted(free) == [block.block_id for block in pool.blocks if block.num_refs == 0]
        assert len(free) == pool.num_free
        assert {block.name: block for block in pool.blocks if block.name is not None} == pool.named

    def _others(self, pool: BlockPool) -> Counter[int]:
        """How often blocks of a pool are used by what is no sequence."""
        return Counter()

    def _check_requests(self) -> None:
        scheduler = self.scheduler
        assert len(scheduler.running) <= self.config.max_num_seqs
        slots = [sequence.slot for sequence in scheduler.running]
        assert len(set(slots)) == len(slots) and all(0 <= n < self.config.max_num_seqs for n in slots)
        assert scheduler.running == sorted(scheduler.running, key=self.order)
        assert scheduler.num_unfinished == len(self.live())
        samples: dict[Sequence, list[int]] = {sequence: [] for sequence in self.streams}
        for step in scheduler.in_flight:
            for sequence, row in zip(step.sequences, step.rows, strict=True):
                samples[sequence].append(row.num_samples * step.num_steps)
        for sequence, stream in self.streams.items():
            assert sequence.finished == stream.ended
            assert (sequence in scheduler.running) == (sequence.state is State.RUNNING)
            assert sequence.token_ids[sequence.num_prompt_tokens :] == stream.tokens
            if sequence.state is State.RUNNING:
                in_flight = samples[sequence]
                assert (len(in_flight), sum(in_flight)) == (sequence.num_in_flight, sequence.num_pending)
                assert all(num_samples <= 1 for num_samples in in_flight[:-1])
                assert sequence.computed <= len(sequence.blocks) * self.config.block_size
                assert sequence.num_output_tokens + sequence.num_pending <= sequence.max_output
            else:
                assert not sequence.blocks and sequence.slot == -1 and sequence.computed == 0
                assert self.states is None or sequence not in self.states.held
            if sequence.state is State.WAITING:
                assert not samples[sequence]

        self._check_tenants()

    def _check_tenants(self) -> None:
        """What is counted of each tenant is what its sequences are and have. Suspects do not count as waiting."""
        waiting: Counter[Account] = Counter()
        running: Counter[Account] = Counter()
        num_output: Counter[Account] = Counter()
        for sequence in self.streams:
            waiting[sequence.tenant] += sequence.state is State.WAITING
            running[sequence.tenant] += sequence.state is State.RUNNING
            done = sequence.request.output_token_ids
            num_output[sequence.tenant] += sequence.num_output_tokens - (
                len(done[sequence.index]) if done else 0
            )
        waiting.subtract(sequence.tenant for sequence in self.scheduler.waiting.suspects)
        waiting.subtract(sequence.tenant for sequence in self.scheduler.sequences._held)
        for tenant in self.scheduler.waiting.tenants:
            counted = (tenant.num_waiting, tenant.num_running, tenant.num_output_tokens)
            assert counted == (waiting[tenant], running[tenant], num_output[tenant])
        assert set(self.scheduler.waiting._heaps) == {tenant for tenant in waiting if waiting[tenant]}

    def _hear(self, outcomes: list[Outcome]) -> None:
        for sequence, delta in outcomes:
            stream = self.streams[sequence]
            assert not stream.ended, f"{delta} after the end"
            self._hear_delta(sequence, stream, delta)
        self.check()

    def _hear_delta(self, sequence: Sequence, stream: Stream, delta: TokenDelta) -> None:
        stream.deltas.append(delta)
        stream.tokens += delta.token_ids
        if delta.token_ids:
            assert delta.logprobs is not None and delta.logprobs.token_ids.tolist() == delta.token_ids
        if delta.prompt_logprobs is not None:
            stream.prompt_logprobs += delta.prompt_logprobs.token_ids.tolist()
        if delta.finish_reason == "error":
            assert delta.error and not delta.token_ids
            return
        if sequence.pools:
            assert delta.finish_reason == "stop" and not delta.token_ids
            assert delta.pooled == expected_pooled(sequence), "a result depends on how it was scheduled"
            return
        output, reason, stop = expected(sequence)
        assert stream.tokens == output[: len(stream.tokens)], "a token depends on how it was scheduled"
        if delta.token_ids:
            stream.num_crashes = 0
            if sequence.suspicion is NO_SUSPICION:  # it was cleared, by steps alone
                stream.num_relapses = 0
            prompt = sequence.token_ids[: sequence.num_prompt_tokens]
            assert stream.prompt_logprobs == (prompt[1:] if sequence.returns_prompt_logprobs else [])
        if delta.num_cached_tokens is not None:
            assert 0 <= delta.num_cached_tokens < len(sequence.token_ids)
        if len(stream.tokens) == len(output) and reason != "error":
            assert (delta.finish_reason, delta.stop_reason) == (reason, stop)
        else:
            assert delta.finish_reason is None

    def order(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.request.priority if self.config.policy == "priority" else 0, sequence.arrival)

    def _new_worker(self) -> ModelWorker:
        config = self.config
        return ModelWorker(
            config.num_blocks,
            config.block_size,
            config.stages,
            0 if self.states is None else len(self.states.pool),
            0 if self.encoder is None else self.encoder.capacity,
            self.encoder_layers,
            self.cuts_media,
        )

    def _tick(self) -> float:
        self.now += 1.0
        return self.now


def state_slots(states: StateSlots, sequence: Sequence) -> list[Block]:
    """The state slots of a sequence, each as often as it has a reference to it."""
    held = states.held.get(sequence)
    if held is None:
        return []
    others = [slot for slot in (held.latest, held.tried) if slot is not None and slot is not held.own]
    return [held.own, *others, *(checkpoint.slot for checkpoint in held.unnamed)]


@dataclass
class Snapshot:
    """What a plan is measured against: the scheduler as it was before.

    awaiting: a running sequence waits for a token that follows another one.
    sampling: running sequences of which a token is being sampled.
    decoding: those whose next row samples. new: sequences that never ran. served: by tenant.
    queues: by tenant, its waiting sequences in turn, without suspects. handover: the time from which on room may
    change hands.
    """

    order: Order
    running: list[Sequence]
    to_compute: dict[Sequence, int]
    awaiting: bool
    decoding: set[Sequence]
    in_flight: set[Sequence]
    sampling: set[Sequence]
    new: set[Sequence]
    served: dict[Account, int]
    queues: dict[Account, list[Sequence]]
    turn: dict[Sequence, int]
    suspects: bool
    handover: float

    @classmethod
    def of(cls, scheduler: Scheduler, live: list[Sequence]) -> Snapshot:
        running, order = list(scheduler.running), scheduler.waiting.order
        queues: dict[Account, list[Sequence]] = {}
        for sequence in sorted(live, key=lambda s: (order(s)[0], s.turn, s.arrival)):
            if sequence.state is State.WAITING and sequence not in scheduler.waiting.suspects:
                queues.setdefault(sequence.tenant, []).append(sequence)
        return cls(
            order,
            running,
            {sequence: sequence.num_to_compute for sequence in running},
            any(awaits_token(s) and s.computed >= s.num_prompt_tokens for s in running),
            {sequence for sequence in running if sequence.decodes},
            {sequence for step in scheduler.in_flight for sequence in step.sequences},
            {sequence for sequence in running if sequence.num_pending},
            {sequence for sequence in live if not sequence.scheduled_time},
            {tenant: tenant.served for tenant in scheduler.waiting.tenants},
            queues,
            {sequence: sequence.turn for sequence in live},
            bool(scheduler.waiting.suspects),
            scheduler.sequences.next_handover,
        )

    def check(self, scheduler: Scheduler, plan: StepPlan, now: float) -> None:
        config, planned = scheduler.config, list(scheduler.in_flight[-1].owners)
        assert 0 < sum(row.num_tokens for row in plan.rows) <= config.max_num_batched_tokens
        assert len({row.slot for row in plan.rows}) == len(plan.rows) <= config.max_num_seqs
        preempted = [sequence for sequence in self.running if sequence.state is not State.RUNNING]
        assert not self.in_flight.intersection(preempted)
        assert not self.decoding or len(plan.encodes) <= 1, "others wait for pictures"
        encoder = scheduler.kv.group(EncoderCache)
        if self.awaiting and config.step_seconds and encoder is not None and encoder._num_layers:
            made = {encode.entry for encode in plan.encodes}
            assert made.isdisjoint(entry for row in plan.rows for _, _, entry in row.entries), "too early"
        newcomer, givers = self._change(now)
        self._check_suspects(planned)
        by_slot = {sequence.slot: sequence for sequence in scheduler.running}
        admitted = [by_slot[init.slot] for init in plan.inits]
        if self.suspects and not any(sequence.suspect for sequence in self.running):
            assert preempted == self.running, "a trial waits for nobody"
            assert planned == admitted == scheduler.running
            return
        self._check_preempted(scheduler, preempted, givers)
        assert set(admitted) == set(scheduler.running) - set(self.running)
        assert givers or not (preempted and admitted)
        if len(self.running) == config.max_num_seqs and not self.in_flight.issuperset(givers):
            assert any(sequence in preempted for sequence in givers)
        num_before = len(scheduler.in_flight) - 1
        resting = self._check_stages(config, planned, num_before) if config.stages > 1 else set()
        self._check_order(scheduler, planned, admitted, newcomer, givers, resting)
        if admitted and len(scheduler.running) > 1 and not givers:
            assert scheduler.kv.pool.num_free >= int(config.watermark * config.num_blocks)

    def _check_stages(
        self, config: SchedulerConfig, planned: list[Sequence], num_before: int
    ) -> set[Sequence]:
        """No sequence of which a token is sampled runs, and of those that decode no more than their share.

        num_before: steps in flight before this one.

        Returns the sequences that rest for that.
        """
        assert not self.sampling.intersection(planned)
        ready = self.decoding - self.sampling
        num_planned = len(ready.intersection(planned))
        assert num_planned <= -(-len(ready | self.sampling) // config.depth)
        num_left = sum(sequence.state is State.RUNNING for sequence in ready)
        share = min(
            -(-(num_left + len(self.sampling)) // config.depth), -(-num_left // (config.depth - num_before))
        )
        return self.sampling | (ready if num_planned >= share else set())

    def _change(self, now: float) -> tuple[Sequence | None, list[Sequence]]:
        """The sequence that gets the room of another, and those one of which has to give it.

        It is the next that waits, or if that has no right to it, the next of a tenant that has none running.
        """
        if self.suspects or now < self.handover:
            return None, []
        busy = {sequence.tenant for sequence in self.running}
        first, starting = self._next(), self._next(without=busy)
        for newcomer in (first, starting):
            if newcomer not in self.new or self.order(newcomer)[0] != self.order(first)[0]:
                continue
            if givers := self._givers(newcomer, now):
                return newcomer, givers
        return None, []

    def _givers(self, newcomer: Sequence, now: float) -> list[Sequence]:
        """The sequences one of which has to give its room to `newcomer`."""
        if now - newcomer.arrival_time < PATIENCE_SECONDS:
            return []
        num_running = Counter(sequence.tenant for sequence in self.running)
        tenant, givers = newcomer.tenant, []
        for sequence in self.running:
            batch = sequence.tenant is tenant and sequence.request.rank and not newcomer.request.rank
            several = num_running[sequence.tenant] > 1 and not num_running[tenant]
            greedy = several and self.served[sequence.tenant] > self.served[tenant]
            entitled = self.order(sequence)[0] < self.order(newcomer)[0] or sequence.suspect
            if not entitled and (batch or greedy):
                givers.append(sequence)
        return givers

    def _next(self, without: Collection[Account] = ()) -> Sequence | None:
        """The head of the queue of the least served tenant that is not in `without`."""
        heads = [queue[0] for tenant, queue in self.queues.items() if queue and tenant not in without]

        def key(head: Sequence) -> tuple[int, int, int]:
            return (self.order(head)[0], self.served[head.tenant], head.arrival)

        return min(heads, key=key, default=None)

    def _check_preempted(
        self, scheduler: Scheduler, preempted: list[Sequence], givers: Collection[Sequence]
    ) -> None:
        """What was preempted for its blocks was before all behind it that still run; one more gave its room."""

        def last(sequence: Sequence) -> tuple[int, int, int, int]:
            priority, arrival = self.order(sequence)
            return (priority, self.served[sequence.tenant], self.turn[sequence], arrival)

        early = [
            victim
            for victim in preempted
            for other in scheduler.running
            if other in self.turn
            and not (self.order(other) < self.order(victim) or last(other) < last(victim))
        ]
        assert len(set(early)) <= 1 and set(early) <= set(givers)

    def _check_order(
        self,
        scheduler: Scheduler,
        planned: list[Sequence],
        admitted: list[Sequence],
        newcomer: Sequence | None,
        givers: Collection[Sequence],
        resting: Collection[Sequence],
    ) -> None:
        """Nothing passes what comes before it, but what gives its room, and what rests."""
        if admitted and not admitted[0].suspect:
            assert not scheduler.waiting.suspects
            for sequence in admitted:
                assert sequence is (newcomer or self._next())
                self.queues[sequence.tenant].remove(sequence)
                if sequence in self.new:
                    self.served[sequence.tenant] += len(sequence.token_ids) - (
                        sequence.num_cached_tokens or 0
                    )
        run = set(planned)
        left = [s for s in self.running if s.state is State.RUNNING and s not in run and self.to_compute[s]]
        left = [sequence for sequence in left if sequence not in resting]
        if scheduler.kv.group(EncoderCache) is not None:
            left = [sequence for sequence in left if not begins_medium(sequence)]
        if giver := next((sequence for sequence in left if sequence in givers), None):
            left.remove(giver)
        for sequence in left:
            assert not admitted
            # A prompt for which a step has no time left is passed by what decodes, which is not limited.
            no_time = scheduler.config.step_seconds > 0 and sequence not in self.decoding
            rivals = run - self.decoding if no_time else run
            assert all(self.order(other) < self.order(sequence) for other in rivals)

    def _check_suspects(self, planned: list[Sequence]) -> None:
        """Whoever was there at two crashes, or at three with tokens in between, runs alone."""
        if any(sequence.suspect for sequence in planned):
            assert len(planned) == 1 and self.in_flight <= set(planned)
