"""Names of tenants: those for whom requests are served, such as the owner of an API key."""

from __future__ import annotations

import re
from contextvars import ContextVar

# The tenant of work that is done before there is a request, such as decoding pictures; "" for one without a name.
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")

NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


def check_tenant(name: str) -> None:
    """Check the name of a tenant, which stands in log lines and in labels of metrics.

    Raises:
        ValueError: it is empty, longer than 64 characters, or has others than letters, digits and `_.@-`.
    """
    if not NAME.fullmatch(name):
        raise ValueError(f"a tenant's name is 1 to 64 letters, digits and _.@-, got {name[:80]!r}")
