"""Metrics of a router: the metrics of each core, labelled with its number, and the router's own counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

from pagewire.frontend.client import read_metrics
from pagewire.frontend.route.dispatcher import Dispatcher
from pagewire.frontend.route.replica import Replica, ReplicaState
from pagewire.ipc.errors import ProtocolError
from pagewire.ipc.wire.messages import EngineInfo

Row: TypeAlias = dict[str, Any]


def relabel_rows(rows: list[Row], number: int) -> list[Row]:
    """The metrics of a core, with its number as their label `engine`.

    Raises:
        ProtocolError: one of them is no metric.
    """
    try:
        read_metrics(rows)
        return [row | {"labels": row["labels"] | {"engine": str(number)}} for row in rows]
    except (LookupError, TypeError, ValueError) as error:
        raise ProtocolError(f"the answer to metrics is of another type: {error!r:.100}") from None


def router_rows(dispatcher: Dispatcher, info: EngineInfo, replicas: Iterable[Replica]) -> Iterator[Row]:
    """The router's own counts for each core, in the form of a core's metrics."""
    for replica in replicas:
        for kind, name, text, value in router_figures(dispatcher, replica):
            labels = {"model_name": info.served_model_names[0], "engine": str(replica.number)}
            yield {"name": name, "type": kind, "documentation": text, "labels": labels, "value": value}


def router_figures(dispatcher: Dispatcher, replica: Replica) -> Iterator[tuple[str, str, str, float]]:
    """Type, name, description and value of each metric of a core."""
    up = replica.state is ReplicaState.UP
    yield "gauge", "pagewire:route_core_up", "1 while the core gets requests.", int(up)
    text = "Requests that the core has."
    yield "gauge", "pagewire:route_requests", text, dispatcher.num_requests(replica)
    text = "Prompt tokens that were sent to the core and that it has not computed yet."
    yield "gauge", "pagewire:route_waiting_tokens", text, replica.num_waiting
    text = "Cached blocks that the core has reported."
    yield "gauge", "pagewire:route_blocks", text, dispatcher.num_blocks(replica)
    text = "Requests that the core was sent, also those that went on there."
    yield "counter", "pagewire:route_requests_total", text, replica.num_placed
    text = "Requests that went on elsewhere: the core died, was drained, or refused them."
    yield "counter", "pagewire:route_moved_total", text, replica.num_moved
    text = "Tokens of the requests that the core was sent."
    yield "counter", "pagewire:route_tokens_total", text, replica.num_prompt_tokens
    text = "Tokens of these that the router knew to be cached there."
    yield "counter", "pagewire:route_cached_tokens_total", text, replica.num_cached_tokens
    text = "Reports on blocks that were missed, after which the core sent all again."
    yield "counter", "pagewire:route_gaps_total", text, replica.num_gaps
