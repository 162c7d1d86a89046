"""Conversations of /v1/conversations: items in order, to which responses add their input and output.

They are in memory, limited in bytes; those used least recently go first, of the tenant that has most.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.responses.items import PREFIXES, new_id
from pagewire.ipc.quoting import quoted

JSON = dict[str, Any]
ENTRY_BYTES = 512  # counted for each conversation and item, beside its JSON


class StoredConversation:
    """The items of a conversation, each as JSON.

    Attributes:
        id, created_at, metadata: as its answers have them. owner: name of its tenant; for others it does not exist.
        num_bytes: what it counts for.
    """

    def __init__(self, owner: str, metadata: dict[str, str]) -> None:
        self.id, self.created_at = new_id("conv"), int(time.time())
        self.owner, self.metadata = owner, metadata
        self._items: dict[str, bytes] = {}

    @property
    def num_bytes(self) -> int:
        sizes = sum(map(len, self._items.values())) + len(msgspec.json.encode(self.metadata))
        return sizes + ENTRY_BYTES * (1 + len(self._items))

    @property
    def ids(self) -> list[str]:
        """The ids of its items, in order."""
        return list(self._items)

    def items(self) -> list[JSON]:
        """All items, in order."""
        return [msgspec.json.decode(item) for item in self._items.values()]

    def item(self, name: str) -> JSON:
        """The item with an id.

        Raises:
            APIError: there is none.
        """
        if name not in self._items:
            raise APIError(404, f"the conversation has no item {quoted(name)}", code="not_found")
        item: JSON = msgspec.json.decode(self._items[name])
        return item

    def remove(self, name: str) -> None:
        """Remove an item. Raises as `item`."""
        self.item(name)
        del self._items[name]

    def append(self, items: Iterable[JSON]) -> list[JSON]:
        """Add items, and return them; one whose id is taken gets another."""
        added = []
        for item in items:
            if item["id"] in self._items:
                item = {**item, "id": new_id(PREFIXES.get(item["type"], "item"))}
            self._items[item["id"]] = msgspec.json.encode(item)
            added.append(item)
        return added


class ConversationStore:
    """The stored conversations. limit: total size in bytes; 0: none are stored."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: OrderedDict[str, StoredConversation] = OrderedDict()
        self._by_owner: Counter[str] = Counter()  # bytes
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def create(self, owner: str, metadata: dict[str, str], items: Iterable[JSON]) -> StoredConversation:
        """Make a conversation.

        Raises:
            APIError: it is larger than all that may be stored.
        """
        conversation = StoredConversation(owner, metadata)
        conversation.append(items)
        if not self.keep(conversation):
            raise conversation_too_large(self._limit)
        return conversation

    def get(self, name: str, owner: str) -> StoredConversation:
        """The owner's conversation with an id, which counts as used.

        Raises:
            APIError: it is not stored, or is another's.
        """
        found = self._stored.get(name)
        if found is None or found.owner != owner:
            message = f"conversation {quoted(name)} is not stored (any more)"
            raise APIError(404, message, param="conversation", code="not_found")
        self._stored.move_to_end(name)
        return found

    def keep(self, conversation: StoredConversation) -> bool:
        """Store a conversation, or count it again; False, and it is gone, if there is no room.

        Others are dropped to make room: of the tenant that has most, with this one, the least recently used.
        """
        self.forget(conversation.id)
        size = conversation.num_bytes
        if size > self._limit:
            return False
        self._by_owner[conversation.owner] += size
        while self._by_owner.total() > self._limit:
            largest = max(self._by_owner, key=lambda owner: self._by_owner[owner])
            oldest = next((name for name, each in self._stored.items() if each.owner == largest), None)
            if oldest is None:  # only this one
                break
            self.forget(oldest)
        self._stored[conversation.id], self._sizes[conversation.id] = conversation, size
        return True

    def forget(self, name: str) -> None:
        """Remove a conversation, if it is stored."""
        if (conversation := self._stored.pop(name, None)) is not None:
            self._by_owner[conversation.owner] -= self._sizes.pop(name)
            if not self._by_owner[conversation.owner]:
                del self._by_owner[conversation.owner]


def conversation_too_large(limit: int) -> APIError:
    """The error for a conversation that there is no room for."""
    message = f"the conversation is over the {limit} bytes that are stored (--response-store-bytes)"
    return APIError(413, message, code="request_too_large")
