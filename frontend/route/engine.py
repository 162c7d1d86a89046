"""`AsyncLLM` on several cores: what `pagewire route` serves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pagewire.frontend.client import AsyncLLM, MediaAccess, Owner, Session, intake_opener, own_salt
from pagewire.frontend.route.fleet import Fleet
from pagewire.frontend.route.placement import Policy
from pagewire.frontend.route.places import running_place
from pagewire.frontend.route.replica import CorePlace


def open_router(
    places: Sequence[CorePlace],
    *,
    patience: float = 30.0,
    policy: Policy = "prefix",
    place_at: Callable[[str], CorePlace] = running_place,
    traces_endpoint: str | None = None,
    media_access: MediaAccess | None = None,
    **tokenizer_options: Any,
) -> AsyncLLM:
    """An engine made of several cores of the same model.

    patience: seconds for which requests wait when no core is left. place_at: the place of a core that is added.
    media_access: what may be fetched for prompts. tokenizer_options: of `load_tokenizer`.

    Raises:
        EngineDeadError: no core answers. ValueError: two serve different models. If one fails while it starts: as
        `AsyncLLM.from_engine_args`.
    """

    def connect(owner: Owner) -> Fleet:
        return Fleet(places, owner, patience=patience, policy=policy, place_at=place_at)

    intake = intake_opener(None, own_salt(), media_access or MediaAccess(), **tokenizer_options)
    return AsyncLLM(Session(connect, intake, traces_endpoint))
