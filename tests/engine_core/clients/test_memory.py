"""The memory of unfinished requests: what it is estimated at, who may take how much, and when it is given back."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pagewire.engine_core.clients.footprint import RequestFootprint, footprint_of
from pagewire.engine_core.clients.memory import Charge, Memory
from pagewire.engine_core.intake import MessageIntake
from pagewire.engine_core.schedule.sequence import Sequence, sequences
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire import budget
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.embeddings import media_of
from pagewire.ipc.wire.items import Prompt
from pagewire.ipc.wire.messages import Abort, Goodbye, Submit, ToCore
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.tasks import submitted
from tests.engine_core.conftest import RawFrontend, RunningCore

# ---------------------------------------------------------------- accounts


def fill(memory: Memory, frontend: int, tenant: str, size: int) -> list[Charge]:
    """Charge requests of one size until one is refused."""
    charges = []
    with pytest.raises(EngineBusyError, match="wait until some have ended"):
        while True:
            charges.append(memory.charge(frontend, tenant, RequestFootprint(size)))
    return charges


def test_none_of_many_greedy_frontends_locks_others_out() -> None:
    memory = Memory(1_000_000)
    charges = [fill(memory, frontend, "", 1000) for frontend in range(8)]
    assert len(charges[0]) == 250  # half of it all is the frontend's, and half of that the tenant's
    for taken in charges:
        assert len(taken) * 1000 >= 250_000 * 0.75 ** len(charges) - 1000
    assert memory.num_bytes <= 1_000_000
    memory.charge("modest", "", RequestFootprint(10_000)).release()
    for charge in [charge for taken in charges for charge in taken]:
        charge.release()
    assert memory.num_bytes == len(memory) == 0
    assert len(fill(memory, 1, "", 1000)) == 250


def test_a_greedy_tenant_leaves_room_for_those_of_the_same_frontend() -> None:
    memory = Memory(1_000_000)
    greedy = fill(memory, 1, "greedy", 1000)
    assert len(greedy) == 250
    others = [fill(memory, 1, f"tenant{number}", 1000) for number in range(3)]
    assert [len(taken) for taken in others] == [125, 62, 31]
    with pytest.raises(
        EngineBusyError, match="unfinished ones of tenant 'greedy' take 250,000 of the 141,000"
    ):
        memory.charge(1, "greedy", RequestFootprint(1000))
    assert len(fill(memory, 2, "greedy", 1000)) > 100  # of another frontend: names of tenants are not trusted


def test_a_request_that_goes_on_has_room_where_a_new_one_has_none() -> None:
    memory = Memory(1_000_000)
    fill(memory, 1, "", 1000)
    memory.charge(1, "", RequestFootprint(100_000), resumed=True)


def test_a_request_for_which_there_is_never_room_is_refused_for_good() -> None:
    memory = Memory(1_000_000)
    with pytest.raises(ValueError, match="takes 250,001 bytes of memory, and one may take 250,000"):
        memory.charge(1, "", RequestFootprint(250_001))
    assert memory.num_bytes == len(memory) == 0
    memory.charge(1, "", RequestFootprint(250_000)).release()


def test_what_requests_share_counts_once_for_each_account_whatever_ends_first() -> None:
    draw = random.Random(0)
    memory = Memory(1 << 40)
    objects = [object() for _ in range(6)]
    sizes = {id(part): draw.randrange(1, 1000) for part in objects}
    charges: list[tuple[int, str, Charge]] = []
    for _ in range(2000):
        if charges and draw.random() < 0.45:
            charges.pop(draw.randrange(len(charges)))[2].release()
        else:
            frontend, tenant = draw.randrange(3), draw.choice(("", "a", "b"))
            chosen = draw.sample(objects, draw.randrange(4))
            footprint = RequestFootprint(
                draw.randrange(1000), tuple((part, sizes[id(part)]) for part in chosen)
            )
            charges.append((frontend, tenant, memory.charge(frontend, tenant, footprint)))
        footprints = [charge.footprint for _, _, charge in charges]
        shared = {id(part): size for footprint in footprints for part, size in footprint.parts}
        assert memory.num_bytes == sum(each.own_bytes for each in footprints) + sum(shared.values())
    for _, _, charge in charges:
        charge.release()
    assert memory.num_bytes == len(memory) == 0


# ---------------------------------------------------------------- footprints

TEXT = "\N{LATIN SMALL LETTER A WITH DIAERESIS}" * 1000
PROMPT = [index % 1000 for index in range(5000)]
REQUESTS: dict[str, Callable[[int], Request]] = {
    "short": lambda key: Request(key, f"request-{key}", Prompt([1, 2, 3]), SamplingParams(), 7),
    "long": lambda key: Request(key, f"request-{key}", Prompt(PROMPT), SamplingParams(), 7),
    "many sequences": lambda key: Request(key, f"request-{key}", Prompt(PROMPT), SamplingParams(n=16), 7),
    "resumed": lambda key: Request(
        key, f"request-{key}", Prompt(PROMPT), SamplingParams(n=2), 7, output_token_ids=[PROMPT] * 2
    ),
    "bias": lambda key: Request(
        key, "r", Prompt([1]), SamplingParams(logit_bias=dict.fromkeys(range(key, key + 3000), key + 0.5)), 7
    ),
    "lists": lambda key: Request(
        key,
        "r",
        Prompt([1]),
        SamplingParams(
            stop=[f"{TEXT}{key}{index}"[-1000:] for index in range(100)],
            allowed_token_ids=list(range(key, key + 5000)),
            bad_words_token_ids=[[key + 300, index + 300] for index in range(1000)],
        ),
        7,
    ),
    "structure": lambda key: Request(
        key,
        "r",
        Prompt([1]),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=[f"{key}{i}" for i in range(5000)])),
        7,
    ),
    "pooling": lambda key: Request(key, f"request-{key}", Prompt(PROMPT), PoolingParams(task="embed"), 0),
    "embeddings": lambda key: Request(
        key,
        "r",
        Prompt([0] * 100, media_of(Tensor("float32", (100, 64), bytes([key % 100]) * 25_600))),
        SamplingParams(),
        7,
    ),
}


NUM_REQUESTS = 10


class Numbers:
    """An engine's sizes, of which `MessageIntake` makes the numbers that all prompts have."""

    def __init__(self) -> None:
        self.info = SimpleNamespace(vocab_size=10_000, lora=None)


@pytest.mark.parametrize("kind", REQUESTS)
def test_the_estimate_is_near_the_memory_that_python_takes(kind: str) -> None:
    codec: Codec[Any] = Codec(ToCore)
    intake = MessageIntake(Numbers(), None)  # type: ignore[arg-type]
    frames = [codec.encode(Submit([REQUESTS[kind](key)])) for key in range(NUM_REQUESTS)]
    kept: list[tuple[Request, list[Sequence]]] = []

    def keep(messages: list[Any]) -> None:
        for number, message in enumerate(messages):
            (request,) = submitted(codec.decode(message))
            intake._share_numbers(request)
            group = sequences(request, b"client", number, 0.0, max_model_len=20_000, share_prefixes=True)
            kept.append((request, group))

    keep(frames[:2])  # what is made once
    kept.clear()
    tracemalloc.start()
    try:
        keep(frames)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    footprints = [footprint_of(request) for request, _ in kept]
    estimate = sum(each.own_bytes + sum(size for _, size in each.parts) for each in footprints)
    received = sum(len(medium.data.data) for request, _ in kept for medium in request.prompt.media)
    taken += received  # contents lie in the frames
    assert 0.8 * taken <= estimate <= 2.0 * taken + NUM_REQUESTS * 2000, (taken, estimate)


@pytest.mark.parametrize(
    ("max_model_len", "vocab_size"), [(128, 1000), (131_072, 150_000), (1 << 20, 262_144)]
)
def test_the_largest_request_of_an_engine_has_room_in_an_idle_one(
    max_model_len: int, vocab_size: int
) -> None:
    tokens, max_n = [1] * max_model_len, 64
    params = SamplingParams(
        n=1,
        allowed_token_ids=list(range(vocab_size)),
        logit_bias=dict.fromkeys(range(vocab_size), 0.5),
        stop=["x" * budget.MAX_STOP_CHARS] * budget.MAX_STOPS,
        structured_outputs=StructuredOutputsParams(regex="\N{PILE OF POO}" * budget.MAX_STRUCTURE_CHARS),
    )
    params.n = max_n
    media = media_of(Tensor("uint8", (1, 1), b"x"))
    media[0].data = Tensor("uint8", (budget.MAX_EMBEDDINGS_BYTES,), bytes(budget.MAX_EMBEDDINGS_BYTES))
    request = Request(1, "r" * 1024, Prompt([1], media), params, 7, output_token_ids=[tokens] * max_n)
    memory = Memory(budget.unfinished_bytes(max_model_len, vocab_size, max_n))
    for each in (request, msgspec.structs.replace(request, prompt=Prompt(tokens), output_token_ids=None)):
        memory.charge(1, "", footprint_of(each)).release()


# ---------------------------------------------------------------- a whole core

LARGE = list(range(900))  # allowed tokens: some 36 KiB


@pytest.fixture
def core(start_core: Callable[..., RunningCore]) -> RunningCore:
    """A core that has room for half a megabyte of one frontend."""
    return limited(start_core())


def limited(running: RunningCore) -> RunningCore:
    running.serving.intake._memory = Memory(2_000_000)
    return running


def attached(core: RunningCore, name: str, *, pauses: bool = True) -> RawFrontend:
    """A frontend. pauses: the engine is paused, so that requests stay unfinished."""
    frontend: RawFrontend = core.frontend(name)
    frontend.attach()
    if pauses:
        assert frontend.call("pause").result is True
    return frontend


def request(key: int, **params: Any) -> Request:
    return Request(key, f"r{key}", Prompt([5, 6]), SamplingParams(**params), 7, eos_token_id=999)


def submit_until_refused(frontend: RawFrontend, keys: Iterator[int]) -> list[int]:
    """Submit one after the other until the core refuses one; returns the keys of those that it took."""
    taken: list[int] = []
    while True:
        key = next(keys)
        frontend.say(Submit([request(key, allowed_token_ids=LARGE)]))
        frontend.status()
        if (key, 0) in frontend.ends:
            assert frontend.ends[key, 0].error_type == "EngineBusyError"
            assert "wait until some have ended" in str(frontend.ends[key, 0].error)
            return taken
        taken.append(key)


def test_a_core_refuses_what_would_fill_its_memory_and_serves_others(core: RunningCore) -> None:
    greedy, modest = attached(core, "greedy"), attached(core, "modest")
    memory, keys = core.serving.intake._memory, count()
    taken = submit_until_refused(greedy, keys)
    assert 5 < len(taken) < 20
    num_bytes = memory.num_bytes
    greedy.say(Abort(keys=taken[:3]))  # which makes room for as many
    assert len(submit_until_refused(greedy, keys)) == 3 and abs(memory.num_bytes - num_bytes) < 100
    modest.say(Submit([request(1, allowed_token_ids=LARGE, max_tokens=2)]))
    greedy.say(Goodbye())
    modest.call("resume")
    modest.finish((1, 0))
    assert modest.ends[1, 0].finish_reason == "length"
    modest.status()
    assert memory.num_bytes == len(memory) == 0


ENDS: dict[str, Callable[[RawFrontend], object]] = {
    "finished": lambda frontend: (frontend.call("resume"), frontend.finish((1, 0), (1, 1))),
    "aborted": lambda frontend: frontend.say(Abort(keys=[1])),
    "one sequence, then the other": lambda frontend: frontend.say(Abort(sequences=[(1, 0), (1, 1)])),
    "by another frontend": lambda frontend: frontend.call("abort_request", "r1"),
    "attached again": lambda frontend: frontend.attach(),
}


@pytest.mark.parametrize("how", ENDS)
def test_memory_is_given_back_however_a_request_ends(core: RunningCore, how: str) -> None:
    frontend, memory = attached(core, "test"), core.serving.intake._memory
    frontend.say(Submit([request(1, n=2, max_tokens=5)]))
    frontend.status()
    assert memory.num_bytes > 0 and len(memory) == 3
    ENDS[how](frontend)
    frontend.begin_call(9, "status")
    while getattr(frontend.hear(), "call_id", None) != 9:
        pass
    assert memory.num_bytes == len(memory) == 0 and core.error is None


def test_a_request_that_is_refused_otherwise_takes_no_memory(start_core: Callable[..., RunningCore]) -> None:
    core = limited(start_core(max_waiting=1))
    frontend, memory = attached(core, "test"), core.serving.intake._memory
    frontend.say(Submit([request(key) for key in range(3)]))
    frontend.finish((1, 0), (2, 0))
    assert {end.error_type for end in frontend.ends.values()} == {"EngineBusyError"}
    assert "max_waiting" in str(frontend.ends[1, 0].error)
    (sequence,) = core.clients.attached[b"test"].requests
    assert memory.num_bytes == footprint_of(sequence.request).own_bytes
    frontend.say(Abort(keys=[0]))
    frontend.submit(9, [5, 6], structured_outputs=StructuredOutputsParams(regex="("))
    frontend.finish((9, 0))
    assert frontend.ends[9, 0].finish_reason == "error"
    frontend.status()
    assert memory.num_bytes == len(memory) == 0


def test_equal_parameters_of_one_message_count_once(core: RunningCore) -> None:
    frontend, memory = attached(core, "many"), core.serving.intake._memory
    frontend.say(Submit([request(key, allowed_token_ids=LARGE) for key in range(50)]))
    frontend.status()
    assert not frontend.ends and memory.num_bytes < 50 * 10_000
    frontend.say(Abort(keys=list(range(49))))
    frontend.status()
    assert memory.num_bytes > 30_000
    frontend.say(Abort(keys=[49]))
    frontend.status()
    assert memory.num_bytes == len(memory) == 0


def test_extra_arguments_which_the_core_does_not_read_take_no_memory(core: RunningCore) -> None:
    frontend = attached(core, "test")
    frontend.say(Submit([request(1, extra_args={"a": [[]] * 60_000})]))
    frontend.status()
    (sequence,) = core.clients.attached[b"test"].requests
    assert sequence.params.extra_args is None


def test_a_request_that_goes_on_is_charged_with_its_tokens(core: RunningCore) -> None:
    frontend, memory = attached(core, "test"), core.serving.intake._memory
    resumed = request(1, max_tokens=100)
    resumed.output_token_ids = [[300] * 50]
    frontend.say(Submit([resumed]))
    frontend.status()
    (sequence,) = core.clients.attached[b"test"].requests
    (done,) = sequence.request.output_token_ids or []
    assert memory.num_bytes == footprint_of(sequence.request).own_bytes
    assert footprint_of(sequence.request).own_bytes == footprint_of(request(1)).own_bytes + 2 * 50 * 8
    assert len(done) == 50 and len({id(token) for token in [*done, *sequence.token_ids[2:]]}) == 1
