"""Options with which a model fits into memory: the bits of its weights, and the length of its context. No IO."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import msgspec

from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.errors import LoadError
from pagewire.workers.estimate.figures import Footprint
from pagewire.workers.estimate.fit import Fit, amount, fit

QUANTIZATIONS = ("int8", "int4")
"""What plain weights are made of while they are loaded, the most exact first."""
ENOUGH_TOKENS = 8192
"""Of context: fewer bits are taken before it becomes shorter than this."""
LEAST_TOKENS = 1024
"""Of context: a model that has no room for them does not fit."""
ROUND_TOKENS = 256

Measure = Callable[[WorkerConfig], Footprint]
Kept = Callable[[WorkerConfig], int | None]


class Fitted(NamedTuple):
    """changes: options by name, beside those that were given; none if the model does not fit at all."""

    changes: dict[str, Any]
    fit: Fit

    def __str__(self) -> str:
        """What was chosen, in a line."""
        fit = self.fit
        options = ", ".join(f"{name} {value}" for name, value in self.changes.items() if name in SAID)
        return (
            f"{options or 'as it is'}: {amount(fit.weight_bytes)} of weights, {amount(fit.kv_bytes)} of KV cache "
            f"for {fit.kv_tokens:,} tokens, in {amount(fit.available_bytes)}"
        )


SAID = ("quantization", "max_model_len")


def fitted(
    measure: Measure, config: WorkerConfig, given: Collection[str], memory: int, kept: Kept = lambda _: None
) -> Fitted:
    """The options with which a model fits into `memory` bytes, as exact and as long as there is room.

    As it is, if that fits. Else with a shorter context, but not below `ENOUGH_TOKENS`; else with 8, then 4 bits of
    weights that are plain, each with the longest context that fits; at last with the fewest bits, and a context
    down to `LEAST_TOKENS`.

    measure: the footprint of the model with options. config: those that it would have. given: names of options that
    the user has given, which stay. kept: `kept_bytes` of options.

    Raises:
        LoadError: an option about memory is malformed.
    """
    plain = measure(config)
    whole = config.max_model_len or plain.dimensions.max_positions
    as_it_is = fit(plain, config, memory, memory, kept(config))
    if as_it_is.problem is None:
        return Fitted(bounded({}, config, given, as_it_is), as_it_is)
    quantizations: list[str | None] = [None]
    if plain.quantization is None and "quantization" not in given:
        quantizations += QUANTIZATIONS
    tries = [(min(whole, ENOUGH_TOKENS), one) for one in quantizations]
    tries += [(min(whole, LEAST_TOKENS), one) for one in reversed(quantizations)]
    for least, quantization in tries:
        changes: dict[str, Any] = {} if quantization is None else {"quantization": quantization}
        changed = msgspec.structs.replace(config, **changes)
        try:
            sizes = measure(changed)
        except LoadError:
            continue  # this model cannot be quantised so
        floor = whole if "max_model_len" in given else least
        found = longest(sizes, changed, floor, whole, memory, kept)
        if found is not None:
            if found.max_model_len < whole:
                changes["max_model_len"] = found.max_model_len
            return Fitted(bounded(changes, config, given, found), found)
    return Fitted({}, as_it_is)


def longest(
    sizes: Footprint, config: WorkerConfig, floor: int, whole: int, memory: int, kept: Kept
) -> Fit | None:
    """How a model fits with the longest context from `floor` to `whole` tokens; None: with none of them."""

    def of(tokens: int) -> Fit:
        changed = msgspec.structs.replace(config, max_model_len=tokens)
        return fit(sizes, changed, memory, memory, kept(changed))

    best = of(floor)
    if best.problem is not None:
        return None
    if (all_of_it := of(whole)).problem is None:
        return all_of_it
    low, high = floor // ROUND_TOKENS, -(-whole // ROUND_TOKENS)  # the first fits, the second does not
    while high - low > 1:
        middle = (low + high) // 2
        found = of(middle * ROUND_TOKENS)
        if found.problem is None:
            low, best = middle, found
        else:
            high = middle
    return best


def bounded(
    changes: dict[str, Any], config: WorkerConfig, given: Collection[str], found: Fit
) -> dict[str, Any]:
    """The changes, with the size of the KV cache that was found: else it would grow into what others need."""
    if config.num_blocks is None and config.speculative is None and "kv_cache_memory_bytes" not in given:
        return {**changes, "kv_cache_memory_bytes": found.kv_bytes + found.state_bytes}
    return changes
