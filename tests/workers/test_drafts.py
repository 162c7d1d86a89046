"""With drafts or without, alone or among others: the same tokens, bits of log probabilities, and ends.

The real scheduler drives a real runner of a tiny model, with every kind of drafter and lengths that follow nothing.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from pagewire.engine_core.adapters.adapter import Adapter
from pagewire.engine_core.grammar.compile import compile_grammar
from pagewire.engine_core.grammar.matcher import Grammar
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.engine_core.schedule.speculation import NoSpeculation, Speculation
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import LogprobRows, Prompt
from pagewire.ipc.wire.lora import AdapterSource
from pagewire.ipc.wire.messages import Request, TokenDelta
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.worker_messages import Masks, StepPlan
from pagewire.workers.run.runner import Runner
from tests.engine_core.schedule.simulation import Forced, drafting
from tests.workers.architectures import SERVED, VOCAB_SIZE
from tests.workers.driver import load_runner
from tests.workers.peft_adapters import LIMITS, AdaptedRunner
from tests.workers.random_adapters import write

MAX_MODEL_LEN = 64
EOS = 7
FEW = [EOS, 10, 11, 12, 13]  # a tiny model repeats itself if it can say little else
REGEX = "(ab|cde){2,5}f"
STOPPED_BY_FRONTEND = 8  # tokens after which a frontend finds a stop string


@functools.cache
def grammar() -> Grammar:
    """A grammar over the tiny model's vocabulary, in which token 10 is "a"."""
    tokens = [
        b"<eos>" if i == EOS else bytes([ord("a") + i - 10 if i >= 10 else 1]) for i in range(VOCAB_SIZE)
    ]

    class Letters(SimpleNamespace):
        def __call__(self, text: bytes) -> list[int]:
            return [byte - ord("a") + 10 for byte in text]

    letters = Letters(eos_token_id=EOS, bos_token_id=None, tokens=tokens, special_token_ids=[EOS])
    tokenizer = LLTokenizer(TokenizerWrapper(letters), n_vocab=VOCAB_SIZE)
    return compile_grammar(StructuredOutputsParams(regex=REGEX), tokenizer, VOCAB_SIZE)


def params(**fields: object) -> SamplingParams:
    values = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True, **fields}
    if "structured_outputs" not in values:
        values["allowed_token_ids"] = FEW
    return SamplingParams(**values)  # type: ignore[arg-type]


PARAMS = {
    "greedy": params(),
    "sampled": params(temperature=1.0, ignore_eos=False),
    "penalties": params(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.3, frequency_penalty=0.5),
    "bad words": params(bad_words_token_ids=[[11, 12], [13, 10, 11]], temperature=0.5),
    "grammar": params(structured_outputs=StructuredOutputsParams(regex=REGEX), temperature=1.0),
    "greedy grammar": params(structured_outputs=StructuredOutputsParams(regex=REGEX), max_tokens=6),
    "logprobs": params(logprobs=3, temperature=0.7),
    "prompt logprobs": params(prompt_logprobs=2, logprobs=0),
    "n": params(n=4, temperature=1.0, logprobs=1),
    "stop string": params(temperature=0.3, max_tokens=20),
    "stop token": params(stop_token_ids=list(range(0, VOCAB_SIZE, 5)), ignore_eos=False),
    "min tokens": params(stop_token_ids=list(range(0, VOCAB_SIZE, 5)), min_tokens=7),
    **{f"{count} tokens": params(max_tokens=count, logprobs=0) for count in range(1, 6)},
}


@dataclass
class Output:
    """All that a frontend gets of a sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    prompt_logprobs: list[object] = field(default_factory=list)
    end: tuple[object, object, object] | None = None
    num_drafts: int = 0
    num_accepted: int = 0

    def add(self, delta: TokenDelta) -> None:
        self.tokens += delta.token_ids
        self.logprobs += positions(delta.logprobs)
        self.prompt_logprobs += positions(delta.prompt_logprobs)
        self.num_drafts += delta.num_drafts
        self.num_accepted += delta.num_accepted
        if delta.finish_reason is not None:
            self.end = (delta.finish_reason, delta.stop_reason, delta.error)

    @property
    def content(self) -> tuple[object, ...]:
        return self.tokens, self.logprobs, self.prompt_logprobs, self.end


def positions(rows: LogprobRows | None) -> list[object]:
    """The bytes of each position."""
    if rows is None:
        return []

    def part(tensor: Tensor, i: int) -> bytes:
        size = len(tensor.data) // tensor.shape[0]
        return bytes(tensor.data[i * size : (i + 1) * size])

    each = (rows.token_ids, rows.logprobs, rows.ranks)
    return [tuple(part(tensor, i) for tensor in each) for i in range(rows.ranks.shape[0])]


@dataclass(frozen=True)
class Way:
    """A way to schedule. together: how many copies of all requests run at once; 0: one request at a time."""

    name: str
    depth: int = 2
    together: int = 1
    budget: int = 64
    num_blocks: int = 320
    share_prefixes: bool = True
    num_states: int = 48


WAYS = (
    Way("alone", together=0),
    Way("alone, one step at a time", depth=1, together=0),
    Way("a batch", together=2),
    Way("preempted", num_blocks=20, budget=24),
    Way("no cache, one step at a time", depth=1, share_prefixes=False),
)


def prompt_of(number: int) -> list[int]:
    """Prompts that repeat themselves, and share beginnings."""
    return [11, 12, 13, 14, 11, 12, 13, 14, *([15, 16, 17] * 2), *range(20, 20 + number % 3)]


def requests(way: Way) -> list[list[Request]]:
    """The requests, those together that run at once."""
    named = list(PARAMS.values()) * max(1, way.together)
    made = [
        Request(
            key,
            str(key),
            Prompt(prompt_of(key % len(PARAMS))),
            each,
            seed=key % len(PARAMS),
            eos_token_id=EOS,
        )
        for key, each in enumerate(named)
    ]
    return [made] if way.together else [[each] for each in made]


def has_adapter(key: int) -> bool:
    """True for every second kind of requests."""
    return bool(key % len(PARAMS) % 2)


def generate(
    runner: Runner, way: Way, speculation: Speculation, adapter: Adapter | None = None
) -> dict[tuple[int, int], Output]:
    """The outputs by key and index. adapter: of the requests that may have one."""
    config = SchedulerConfig(
        *(way.num_blocks, 4, MAX_MODEL_LEN, 32, way.budget, "fcfs", way.depth),
    )
    num_states = min(runner.num_states, way.num_states)
    groups = [StateSlots(num_states, 4, 8)] if num_states else []
    scheduler = Scheduler(config, WaitingQueue("fcfs", Accounts(1 << 30)), speculation, groups=groups)
    outputs: dict[tuple[int, int], Output] = {}
    for group in requests(way):
        arrival = 0
        for request in group:
            made = sequences(
                request,
                b"test",
                arrival,
                0.0,
                max_model_len=MAX_MODEL_LEN,
                share_prefixes=way.share_prefixes,
                tenant=Account(b"test"),
            )
            arrival += len(made)
            for sequence in made:
                if adapter is not None and has_adapter(sequence.key):
                    sequence.adapter, sequence.request.prompt.adapter = adapter, adapter.content
                if sequence.params.structured_outputs is not None:
                    sequence.matcher = grammar().matcher(
                        sequence.output_token_ids, sequence.params.ignore_eos
                    )
                outputs[sequence.key, sequence.index] = Output()
                scheduler.add(sequence)
        run(runner, scheduler, outputs)
    if way.name == "preempted":
        assert scheduler.stats.num_preemptions
    return outputs


def run(runner: Runner, scheduler: Scheduler, outputs: dict[tuple[int, int], Output]) -> None:
    """Run all sequences to their ends."""
    stop_string = list(PARAMS).index("stop string")
    launched: deque[StepPlan] = deque()
    while scheduler.num_unfinished or launched:
        plan = scheduler.plan(0.0) if len(launched) < scheduler.config.depth else None
        if plan is not None:
            launched.append(plan)
            continue
        plan = launched.popleft()
        outcomes = scheduler.commit(runner.step(plan, masks_of(scheduler, plan)), 0.0)
        for sequence, delta in outcomes:
            output = outputs[sequence.key, sequence.index]
            output.add(delta)
            if sequence.key % len(PARAMS) == stop_string and len(output.tokens) >= STOPPED_BY_FRONTEND:
                del output.tokens[STOPPED_BY_FRONTEND:]
                output.end = ("stop", "a string", None)
                scheduler.abort([sequence])


def masks_of(scheduler: Scheduler, plan: StepPlan) -> Callable[[], Masks | None]:
    """What makes the masks of the oldest plan."""

    def masks() -> Masks | None:
        found, errors = scheduler.masks(0.0)
        assert not errors and plan.masked
        return found

    return masks


class Adversary(Forced):
    """Proposes tokens of which none is likely."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def waits(self, *_: object) -> bool:
        self._next += 1
        return self._next % 4 > 0

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        self._next += 1
        return [(self._next * 31 + 7 * i) % VOCAB_SIZE for i in range(min(limit, 5))]


@pytest.fixture(scope="module")
def tiny(llama: Path) -> Runner:
    """A runner for many sequences."""
    return load_runner(llama, max_num_seqs=32, num_blocks=320)[0]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A runner of a model with gated delta rules beside attention."""
    folder = SERVED["qwen3_5_text"].write(tmp_path_factory.mktemp("hybrid"))
    return load_runner(folder, max_num_seqs=32, num_blocks=320)[0]


@pytest.fixture(scope="module")
def expected(tiny: Runner) -> dict[tuple[int, int], Output]:
    """Every request alone, one step at a time, without drafts and without shared prefixes."""
    way = Way("alone", depth=1, together=0, share_prefixes=False)
    return generate(tiny, way, NoSpeculation())


def test_the_requests_end_in_all_ways(expected: dict[tuple[int, int], Output]) -> None:
    ends = {output.end for output in expected.values()}
    assert {("length", None, None), ("stop", None, None), ("stop", "a string", None)} <= ends
    assert any(end is not None and isinstance(end[1], int) for end in ends)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("method", ["ngram", "suffix", "adversary"])
def test_drafts_change_nothing(
    tiny: Runner, expected: dict[tuple[int, int], Output], method: str, way: Way
) -> None:
    speculation = Adversary() if method == "adversary" else drafting(method, seed=len(way.name))
    outputs = generate(tiny, way, speculation)
    for (key, index), output in outputs.items():
        name = list(PARAMS)[key % len(PARAMS)]
        assert output.content == expected[key % len(PARAMS), index].content, name
    assert sum(output.num_drafts for output in outputs.values()) > 8
    if method != "adversary":
        assert sum(output.num_accepted for output in outputs.values()) > 2


def test_drafts_change_nothing_beside_adapters(
    llama: Path, expected: dict[tuple[int, int], Output], tmp_path: Path
) -> None:
    adapted = AdaptedRunner(llama, LIMITS, max_num_seqs=32, num_blocks=320)
    loaded = adapted.load(1, write(tmp_path / "adapter"))
    adapter = Adapter(AdapterSource("random", 1), index=1, content=loaded.content)
    alone = generate(adapted.runner, WAYS[0], NoSpeculation(), adapter)
    changed = {key for key, index in alone if alone[key, index].content != expected[key, index].content}
    assert changed and all(map(has_adapter, changed))
    outputs = generate(adapted.runner, WAYS[2], drafting("ngram", seed=5), adapter)
    for (key, index), output in outputs.items():
        assert output.content == alone[key % len(PARAMS), index].content, list(PARAMS)[key % len(PARAMS)]
    assert sum(output.num_accepted for output in outputs.values()) > 2


@pytest.mark.parametrize("way", [*WAYS[::2], Way("few states", num_states=5)], ids=lambda way: way.name)
def test_drafts_change_nothing_where_layers_keep_states(hybrid: Runner, way: Way) -> None:
    alone = Way("alone", depth=1, together=0, share_prefixes=False)
    expected = generate(hybrid, alone, NoSpeculation())
    num_drafts = num_accepted = 0
    for speculation in (Adversary(), drafting("ngram", seed=3)):
        outputs = generate(hybrid, way, speculation)
        for (key, index), output in outputs.items():
            name = list(PARAMS)[key % len(PARAMS)]
            assert output.content == expected[key % len(PARAMS), index].content, name
        num_drafts += sum(output.num_drafts for output in outputs.values())
        num_accepted += sum(output.num_accepted for output in outputs.values())
    assert num_drafts > 8 and num_accepted > 2
