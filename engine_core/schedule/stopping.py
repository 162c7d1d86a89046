"""The ends of a sequence that the core detects: end of sequence, stop tokens, a complete grammar, length.

Stop strings are detected by the frontend, which alone has text; it then aborts the sequence.
"""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence


def stop_ids(sequence: Sequence) -> list[int]:
    """Tokens that end the sequence, which the sampler excludes until `min_tokens` are generated."""
    params, eos_token_id = sequence.params, sequence.request.eos_token_id
    ids = list(params.stop_token_ids or [])
    if eos_token_id is not None and not params.ignore_eos:
        ids.append(eos_token_id)
    if sequence.matcher is not None and not params.ignore_eos:
        ids += (i for i in sequence.matcher.eos_token_ids if i not in ids)
    return ids


def finish_reason(sequence: Sequence) -> tuple[str | None, int | None]:
    """("stop" or "length", the stop token if one of `stop_token_ids` ended it), or (None, None) if it goes on."""
    last, params, num_tokens = sequence.token_ids[-1], sequence.params, len(sequence.token_ids)
    if num_tokens >= sequence.num_prompt_tokens + params.min_tokens:
        if last == sequence.request.eos_token_id and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and last in params.stop_token_ids:
            return "stop", last
    if sequence.matcher is not None and sequence.matcher.complete:
        return "stop", None
    if num_tokens >= sequence.longest:
        return "length", None
    return None, None


def append(sequence: Sequence, token_ids: list[int], now: float) -> tuple[int, str | None, int | None]:
    """Append tokens up to one that ends the sequence; returns how many, and as `finish_reason`.

    Raises:
        GrammarError: a token does not fit the grammar.
    """
    num_tokens, reason, stop_token = 0, None, None
    for token_id in token_ids:
        if sequence.matcher is not None:
            sequence.matcher.accept(token_id)
        sequence.token_ids.append(token_id)
        num_tokens += 1
        reason, stop_token = finish_reason(sequence)
        if reason is not None:
            break
    if sequence.first_token_time == 0.0:
        sequence.first_token_time = now
    else:
        sequence.token_gap = (now - sequence.last_token_time) / num_tokens
    sequence.last_token_time = now
    return num_tokens, reason, stop_token
