"""How many requests of one tenant may be on their way to a core.

A core cannot choose from which frontend it reads next, and a request takes longer to check than to send. So that
one tenant's thousands do not stand before another's single request, a frontend sends further ones of a tenant only
when the core has taken earlier ones: it learns that by the call `fence`, which the core answers behind the requests
before it. A frontend that does not keep to this is detached.
"""

from __future__ import annotations

import msgspec

WINDOW_REQUESTS = 512
WINDOW_BYTES = 1 << 19
FENCES = 4  # in a window that is full


class Load(msgspec.Struct):
    """Requests of one tenant, and the bytes of their messages."""

    num_requests: int = 0
    num_bytes: int = 0

    def __bool__(self) -> bool:
        return self.num_requests > 0

    def add(self, num_requests: int, num_bytes: int) -> None:
        """Count more of them; or less, with negative numbers."""
        self.num_requests += num_requests
        self.num_bytes += num_bytes

    def admits(self, num_requests: int, num_bytes: int) -> bool:
        """Whether this many more requests and bytes fit. An empty window takes a message of any size."""
        return not self or (
            self.num_requests + num_requests <= WINDOW_REQUESTS and self.num_bytes + num_bytes <= WINDOW_BYTES
        )

    @property
    def wants_fence(self) -> bool:
        """Whether these are enough to ask whether the core has taken them."""
        return FENCES * self.num_requests >= WINDOW_REQUESTS or FENCES * self.num_bytes >= WINDOW_BYTES
