"""A message has each task once, and workers get all that they read of it."""

from __future__ import annotations

import copy

import pytest

from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.items import Prompt, Task
from pagewire.ipc.wire.messages import Request, Submit, ToCore
from pagewire.ipc.wire.params import SamplingParams, StructuredOutputsParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.tasks import (
    UNREAD_BY_WORKERS,
    for_workers,
    name_tasks_once,
    restore_tasks,
    share_tasks,
    submission,
    submitted,
)
from pagewire.ipc.wire.worker_messages import SlotInit, StepPlan, ToWorker

CODEC: Codec[ToWorker] = Codec(ToWorker, trusts=True)
TO_CORE: Codec[ToCore] = Codec(ToCore)


def sent(tasks: list[Task]) -> tuple[list[SlotInit], int]:
    """The inits of these tasks as a worker gets them, and the size of their message."""
    inits = [SlotInit(slot, [7], 1, [slot], task, slot) for slot, task in enumerate(tasks)]
    name_tasks_once(inits)
    frames = CODEC.encode(StepPlan(0, [], inits))
    plan = CODEC.decode(frames)
    assert isinstance(plan, StepPlan)
    restore_tasks(plan.inits)
    return plan.inits, sum(map(len, frames))


def long_task() -> SamplingParams:
    return SamplingParams(logit_bias={i: i / 50 for i in range(5000)})


def test_a_task_is_in_a_plan_once() -> None:
    task, other = long_task(), SamplingParams(top_k=4)
    pooled = PoolingParams()
    tasks: list[Task] = [other, task, task, other, pooled, task, long_task(), pooled]
    inits, _ = sent(tasks)
    assert [init.task for init in inits] == tasks
    received = [init.task for init in inits]
    assert received[1] is received[2] is received[5] is not received[6]
    assert received[0] is received[3] and received[4] is received[7]
    assert [init.slot for init in inits] == list(range(8)), "the other fields are their own"
    size = sent([task])[1]
    assert sent([task] * 64)[1] < 1.2 * size


def test_plans_have_nothing_that_workers_do_not_read() -> None:
    task = SamplingParams(
        stop=["x" * 100], stop_token_ids=[8], bad_words=["y"], bad_words_token_ids=[[9]], extra_args={"z": 1},
        structured_outputs=StructuredOutputsParams(regex="a*"), min_tokens=2, allowed_token_ids=[3], seed=5,
    )  # fmt: skip
    given = copy.deepcopy(task)
    (init,), _ = sent([task])
    assert isinstance(init.task, SamplingParams)
    assert task == given, "the core still reads them"
    assert {
        name for name in task.__struct_fields__ if getattr(init.task, name) != getattr(task, name)
    } == set(UNREAD_BY_WORKERS)
    short = SamplingParams(top_k=3)
    assert for_workers(short) is short


def test_a_task_is_submitted_once() -> None:
    task, other = long_task(), SamplingParams(top_k=4)
    tasks: list[Task] = [other, task, task, other, PoolingParams(), task, long_task()]
    requests = [Request(key, "r", Prompt([key + 1]), each, key) for key, each in enumerate(tasks)]
    given = copy.deepcopy(requests)
    frames = TO_CORE.encode(submission(requests))
    assert requests == given and [request.task is each for request, each in zip(requests, tasks, strict=True)]
    message = TO_CORE.decode(frames)
    assert isinstance(message, Submit)
    received = submitted(message)
    assert received == requests
    assert received[1].task is received[2].task is received[5].task
    assert received[0].task is received[3].task is not received[1].task
    many = [Request(key, "r", Prompt([1]), task, 0) for key in range(64)]
    size = len(TO_CORE.encode(submission(many[:1]))[0])
    assert len(TO_CORE.encode(submission(many))[0]) < 1.2 * size
    assert submission(requests[:2]) == Submit(requests[:2]), "nothing is said where nothing is shared"


@pytest.mark.parametrize("task_of", [[0], [0, 0, 0], [1, 0], [0, -1], [0, 2]])
def test_a_message_must_name_a_task_for_each_request(task_of: list[int]) -> None:
    requests = [Request(key, "r", Prompt([1]), SamplingParams(top_k=key + 1), 0) for key in range(2)]
    with pytest.raises(ValueError, match="task_of"):
        submitted(Submit(requests, task_of))


def test_neighbours_share_what_is_equal_in_their_tasks() -> None:
    def task(max_tokens: int, bias: float = 1.0) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, logit_bias={5: bias, 6: 2.0}, stop=["end"])

    tasks: list[Task] = [task(1), task(2), task(2), task(3, bias=1.5), PoolingParams(), task(3)]
    requests = [Request(key, "r", Prompt([1]), each, 0) for key, each in enumerate(copy.deepcopy(tasks))]
    share_tasks(requests)
    assert [request.task for request in requests] == tasks
    assert requests[1].task is requests[2].task is not requests[0].task
    first, second, _, other, _, last = (getattr(request.task, "logit_bias", None) for request in requests)
    assert first is second and other not in (None, first) and last is not first
    assert requests[3].params.stop is requests[0].params.stop


def test_an_index_of_no_init_is_an_error() -> None:
    with pytest.raises(IndexError):
        restore_tasks([SlotInit(0, [1], 1, [0], 3, 0)])
