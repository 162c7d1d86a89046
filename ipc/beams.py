"""The parameters of sampling that have no meaning in beam search: names, neutral values, reasons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagewire.ipc.errors import FieldValueError

_DRAWS = "beam search draws no tokens; sample with best_of instead"
_UNSEARCHED = "beams are extended by tokens, not by text; give stop_token_ids instead"
_UNREPORTED = "a search keeps the score of a beam only; sample with best_of instead"

UNSUPPORTED: Mapping[
    str, tuple[tuple[Any, ...], str]
] = {  # values that say nothing, beside None, and the reason
    "top_p": ((1.0,), _DRAWS),
    "top_k": ((0, -1), _DRAWS),
    "min_p": ((0.0,), _DRAWS),
    "seed": ((-1,), _DRAWS),
    "stop": (([],), _UNSEARCHED),
    "logprobs": ((False,), _UNREPORTED),
    "prompt_logprobs": ((), _UNREPORTED),
    "timestamps": ((), "the rules for timestamps are for a single sequence; sample with best_of instead"),
    "thinking_token_budget": (
        (),
        "beams are ranked by the model's own probabilities; sample with best_of instead",
    ),
}
BEAMS_ONLY: Mapping[str, Any] = {"length_penalty": 1.0, "early_stopping": False}  # by name: the default
MAX_CANDIDATES = 1024
"""The most tokens whose log probabilities a step of a search gets, for each beam, whatever `max_logprobs` is."""


def beam_refusal(fields: Any, searches: bool) -> FieldValueError | None:
    """The error for a parameter that does not go with the search, or only with it; None if all do.

    fields: has the parameters as attributes. searches: `use_beam_search` is set.
    """
    if not searches:
        for name, default in BEAMS_ONLY.items():
            if getattr(fields, name) not in (None, default):
                return FieldValueError(name, "is a parameter of beam search: set use_beam_search")
        return None
    for name, (neutral, reason) in UNSUPPORTED.items():
        value = getattr(fields, name, None)
        if value is not None and (type(value), value) not in [(type(other), other) for other in neutral]:
            return FieldValueError(name, f"is not supported with use_beam_search: {reason}")
    return None
