"""Tasks that parts of a message share: a task may name half a million tokens, and 1,024 requests have the same."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from pagewire.ipc.wire.items import Task
from pagewire.ipc.wire.messages import Request, Submit
from pagewire.ipc.wire.params import SamplingParams

if TYPE_CHECKING:
    from pagewire.ipc.wire.steps import SlotInit

NO_TASK = SamplingParams()  # stands in a request whose task is in another one of the message

# Parameters that the core reads for its workers, or the frontend for the core.
UNREAD_BY_WORKERS = ("stop", "stop_token_ids", "bad_words", "structured_outputs")
LARGE = (*UNREAD_BY_WORKERS, "extra_args", "logit_bias", "allowed_token_ids", "bad_words_token_ids")


def submission(requests: Sequence[Request]) -> Submit:
    """The message that submits these requests, with each task once. The requests are not changed."""
    first: dict[int, int] = {}
    task_of = [first.setdefault(id(request.task), index) for index, request in enumerate(requests)]
    if len(first) == len(requests):
        return Submit(list(requests))
    return Submit(
        [
            request if number == index else without_task(request)
            for index, (request, number) in enumerate(zip(requests, task_of, strict=True))
        ],
        task_of,
    )


def without_task(request: Request) -> Request:
    """A copy of a request for a message in which another one has its task."""
    request = copy.copy(request)
    request.task = NO_TASK
    return request


def submitted(message: Submit) -> list[Request]:
    """The requests of a message that was received, each with its task; what is equal in tasks takes memory once.

    Raises:
        ValueError: `task_of` names no task for each request.
    """
    requests, task_of = message.requests, message.task_of
    if task_of:
        if len(task_of) != len(requests) or not all(0 <= first <= i for i, first in enumerate(task_of)):
            raise ValueError("task_of must name for each request itself or one before it")
        for request, first in zip(requests, task_of, strict=True):
            request.task = requests[first].task
    share_tasks(requests)
    return requests


def share_tasks(requests: Sequence[Request]) -> None:
    """Let neighbours with equal tasks have one object; those with different tasks share equal large parameters.

    The tasks of a thousand prompts may take a hundred MiB.
    """
    for before, request in pairwise(requests):
        earlier, task = before.task, request.task
        if task is earlier:
            continue
        if task == earlier:
            request.task = earlier
        elif isinstance(task, SamplingParams) and isinstance(earlier, SamplingParams):
            for name in LARGE:
                value = getattr(earlier, name)
                if value is not None and getattr(task, name) == value:
                    setattr(task, name, value)


def name_tasks_once(inits: Sequence[SlotInit]) -> None:
    """Send each task of a plan once, with the fields that workers read; other inits name the first one's index."""
    first: dict[int, int] = {}
    for index, init in enumerate(inits):
        if not isinstance(init.task, int):
            same = first.setdefault(id(init.task), index)
            init.task = for_workers(init.task) if same == index else same


def restore_tasks(inits: Sequence[SlotInit]) -> None:
    """Undo `name_tasks_once` in a plan that was received: inits with equal tasks have one object.

    Raises:
        IndexError: there is no such init.
    """
    for init in inits:
        if isinstance(init.task, int):
            init.task = inits[init.task].task


def for_workers(task: Task) -> Task:
    """A task without the fields that no worker reads; the same object if there are none."""
    return without(task, UNREAD_BY_WORKERS) if isinstance(task, SamplingParams) else task


def without(params: SamplingParams, names: Iterable[str]) -> SamplingParams:
    """Parameters without these, which are optional ones; the same object where they are not set."""
    present = [name for name in names if getattr(params, name) is not None]
    if present:
        params = copy.copy(params)
        for name in present:
            setattr(params, name, None)
    return params
