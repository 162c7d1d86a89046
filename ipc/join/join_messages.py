"""The messages between the core and the agents that run its workers on other machines.

An agent is `pagewire worker --join`: it joins the group as a rank, then starts and ends that rank's worker
processes as the core says, and reports how they end. The workers have connections of their own.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from pagewire.ipc.wire.budget import MAX_NAME_CHARS
from pagewire.ipc.wire.items import Message

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
ANY_RANK = -1

# ---------------------------------------------------------------- agent -> core


class Join(Message, tag="join"):
    """Join the group as a rank, or as the lowest one that is free (`ANY_RANK`). machine: its name, for messages."""

    protocol: int
    version: Text
    machine: Text
    pid: int
    rank: int = ANY_RANK


class Started(Message, tag="started"):
    """The worker process of this identity runs."""

    identity: Text
    pid: int


class Ended(Message, tag="ended"):
    """The worker process of this identity has ended, or could not be started. cause: how, as text."""

    identity: Text
    cause: Text


# ---------------------------------------------------------------- core -> agent


class Joined(Message, tag="joined"):
    """The agent has a place in the group."""

    rank: int
    size: int


class StartWorker(Message, tag="start"):
    """Start a worker process; one that runs is killed first. port: where it connects to, at the core's host."""

    identity: str
    port: int


class EndWorker(Message, tag="end"):
    """End the worker process of this identity: kill it, or let it exit by itself."""

    identity: str
    kill: bool


class JoinRefused(Message, tag="refused"):
    """The agent cannot join, and trying again would not help."""

    error: str


class Dismissed(Message, tag="dismissed"):
    """The core has stopped; so does the agent."""


# ---------------------------------------------------------------- both ways


class Alive(Message, tag="alive"):
    """A sign of life: from the core every second, and as an answer."""


FromAgent: TypeAlias = Join | Started | Ended | Alive
ToAgent: TypeAlias = Joined | StartWorker | EndWorker | JoinRefused | Dismissed | Alive
