"""Where and how a core publishes KV events for other routers: vLLM's `kv_events_config`, with its names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pagewire.ipc.wire.sockets import MAX_IPC_PATH, is_loopback


class KVEventsConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Options of the publisher.

    enable_kv_cache_events, publisher: False, or "null", publishes nothing.
    endpoint: address of a ZeroMQ PUB socket, ipc://PATH or tcp://HOST:PORT. replay_endpoint: of a ROUTER socket
        that sends batches again which a subscriber has missed.
    bind: listen at `endpoint`, or connect to it. None is vLLM's rule: listen for ipc:// and where the address has a
        "*" or "::", else connect.
    buffer_steps: batches kept to be sent again. hwm: batches that ZeroMQ keeps for each subscriber.
    topic: the first frame of each message.
    form: "array" writes events by position, which vLLM did up to 0.22 and llm-d and Dynamo read from any version;
        "map" by field name, as vLLM since 0.23.
    open_to_network: allow an address beyond this machine. What is sent is not encrypted, and holds the tokens of
        all prompts and outputs.
    """

    enable_kv_cache_events: bool = True
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    bind: bool | None = None
    buffer_steps: Annotated[int, Meta(ge=0, le=1 << 20)] = 10_000
    hwm: Annotated[int, Meta(ge=1, le=1 << 24)] = 100_000
    topic: Annotated[str, Meta(max_length=1024)] = ""
    form: Literal["array", "map"] = "array"
    open_to_network: bool = False

    @property
    def binds(self) -> bool:
        """True if the publisher listens at `endpoint`."""
        if self.bind is not None:
            return self.bind
        return self.endpoint.startswith("ipc://") or "*" in self.endpoint or "::" in self.endpoint


def kv_events_config(address: str | None, values: Mapping[str, Any]) -> KVEventsConfig | None:
    """The checked options; None if nothing is to be published. address: the endpoint, if it is given by itself.

    Raises:
        ValueError: an option is unknown, has a bad value, or is given twice.
    """
    if address is not None and "endpoint" in values:
        raise ValueError("give kv_events, or an endpoint in kv_events_config, not both")
    if address is None and not values:
        return None
    given = dict(values) | ({} if address is None else {"endpoint": address})
    try:
        config = msgspec.convert(given, KVEventsConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_events_config: {error}") from None
    check_endpoint("endpoint", config.endpoint, config.open_to_network)
    if config.replay_endpoint is not None:
        check_endpoint("replay_endpoint", config.replay_endpoint, config.open_to_network)
    return config if config.enable_kv_cache_events and config.publisher == "zmq" else None


def check_endpoint(name: str, address: str, open_to_network: bool) -> None:
    """Check an address of the publisher.

    Raises:
        ValueError: it is no ipc:// or tcp:// address, or beyond this machine without `open_to_network`.
    """
    kind, _, rest = address.partition("://")
    if kind == "ipc" and rest.startswith("/") and len(rest.encode()) <= MAX_IPC_PATH:
        return
    host, colon, port = rest.rpartition(":")
    if kind != "tcp" or not colon or not (port == "*" or port.isdecimal()) or urlsplit(address).path:
        raise ValueError(f"kv_events: {name} must be ipc:///PATH or tcp://HOST:PORT, got {address!r}")
    if not is_loopback(host.strip("[]")) and not open_to_network:
        raise ValueError(
            f"kv_events: {name} {address!r} reaches other machines, unencrypted, and the events hold the tokens of "
            "all prompts: use loopback or ipc://, or allow it with kv_events_config '{\"open_to_network\": true}'"
        )
