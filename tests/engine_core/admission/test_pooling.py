"""The core's part of pooling: what it admits, and prompts that run as a whole."""

from __future__ import annotations

import pytest

from pagewire.engine_core.admission.validation import check_request
from pagewire.engine_core.schedule.scheduler import Scheduler, SchedulerConfig
from pagewire.engine_core.schedule.sequence import sequences
from pagewire.engine_core.tenants.accounts import Account, Accounts
from pagewire.engine_core.tenants.waiting import WaitingQueue
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Prompt, Task
from pagewire.ipc.wire.messages import EngineInfo
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingInfo, PoolingParams
from pagewire.ipc.wire.requests import Request
from pagewire.ipc.wire.steps import RowResult, StepResult

EMBEDDER = PoolingInfo(["embed", "token_embed"], "MEAN", 8, matryoshka=True, matryoshka_dimensions=[4, 8])
MEAN = PoolingParams(task="embed", all_tokens=True)


def info(pooling: PoolingInfo | None) -> EngineInfo:
    return EngineInfo(
        model="m",
        model_path="m",
        tokenizer="m",
        served_model_names=["m"],
        architecture="A",
        dtype="float32",
        device="cpu",
        vocab_size=100,
        max_model_len=32,
        block_size=16,
        num_blocks=8,
        max_num_seqs=4,
        max_logprobs=20,
        max_n=4,
        seed=0,
        eos_token_id=None,
        generation_config={},
        pooling=pooling,
    )


def request(task: Task, num_tokens: int = 5) -> Request:
    return Request(1, "r", Prompt([7] * num_tokens), task, 0)


def test_admits_what_the_model_serves() -> None:
    check_request(request(MEAN, 32), info(EMBEDDER))
    check_request(request(PoolingParams(task="embed", all_tokens=True, dimensions=4)), info(EMBEDDER))
    check_request(request(PoolingParams(task="token_embed", all_tokens=True)), info(EMBEDDER))


@pytest.mark.parametrize(
    ("task", "num_tokens", "text"),
    [
        (SamplingParams(), 5, "pools and does not generate"),
        (PoolingParams(task="classify", all_tokens=True), 5, "does not serve the task 'classify'"),
        (PoolingParams(all_tokens=True), 5, "does not serve the task None"),
        (PoolingParams(task="embed"), 5, "all_tokens must be True"),
        (PoolingParams(task="embed", all_tokens=True, dimensions=5), 5, "was trained for 4, 8"),
        (PoolingParams(task="embed", all_tokens=True, dimensions=9), 5, "have 8 dimensions"),
        (PoolingParams(task="embed", all_tokens=True, second_segment=2), 5, "no such segment"),
        (MEAN, 0, "empty"),
        (MEAN, 33, "maximum context length is 32"),
    ],
)
def test_refuses_what_a_frontend_should_have_refused(task: Task, num_tokens: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        check_request(request(task, num_tokens), info(EMBEDDER))


def test_an_engine_that_generates_does_not_pool() -> None:
    with pytest.raises(ValueError, match="does not pool"):
        check_request(request(MEAN), info(None))


def test_results_of_many_tokens_are_bounded() -> None:
    tokens = PoolingParams(task="token_embed", all_tokens=True)
    with pytest.raises(ValueError, match="over the limit"):
        check_request(request(tokens, 32), info(PoolingInfo(["token_embed"], "MEAN", 1 << 20)))


def test_whole_prompts_are_never_cut() -> None:
    """Prompts of an encoder: as many in a step as its tokens allow, in order, one block each."""
    scheduler = Scheduler(
        SchedulerConfig(4, 32, 32, max_num_seqs=4, max_num_batched_tokens=32),
        WaitingQueue("fcfs", Accounts(1 << 30)),
    )
    lengths = (20, 13, 12, 32, 1)
    for arrival, length in enumerate(lengths):
        (sequence,) = sequences(
            Request(arrival, "r", Prompt([7] * length), MEAN, 0),
            b"c",
            arrival,
            0.0,
            max_model_len=32,
            share_prefixes=True,
            tenant=Account(b"c"),
            whole=True,
        )
        scheduler.add(sequence)
    ran = []
    for now in range(4):
        plan = scheduler.plan(float(now))
        assert plan is not None
        assert all(row.start == 0 and row.pool and not row.num_samples for row in plan.rows)
        assert all(len(init.block_ids) == 1 for init in plan.inits)
        ran.append([row.num_tokens for row in plan.rows])
        pooled = Tensor("float32", (1,), b"\0\0\0\0")
        done = scheduler.commit(StepResult(plan.step_id, [RowResult(pooled=pooled) for _ in plan.rows]), 1.0)
        assert all(delta.finish_reason == "stop" and delta.pooled == pooled for _, delta in done)
    assert ran == [[20], [13, 12], [32], [1]]
    assert scheduler.num_unfinished == 0 and scheduler.kv.usage == 0.0
