"""The hub's client, pointed at a hub on loopback."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from tests.ipc.files.stores import Store


def use_hub(store: Store, patch: pytest.MonkeyPatch) -> None:
    """Have the hub's client of this process ask a store: it read HF_ENDPOINT when it was imported."""
    patch.setattr(constants, "ENDPOINT", store.address)
    patch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", store.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
