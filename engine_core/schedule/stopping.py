"""The ends of a sequence that the core detects: end of sequence, stop tokens, a complete grammar, length.

Stop strings are detected by the frontend, which alone has text; it then aborts the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from pagewire.engine_core.schedule.sequence import Sequence


def stop_ids(sequence: Sequence) -> list[int]:
    """Tokens that end the sequence, which the sampler excludes until `min_tokens` are generated."""
    ids = list(sequence.stop_token_ids)
    if sequence.eos_token_id is not None:
        ids.append(sequence.eos_token_id)
    if sequence.matcher is not None and not sequence.params.ignore_eos:
        ids += (i for i in sequence.matcher.eos_token_ids if i not in ids)
    return ids


def finish_reason(sequence: Sequence) -> tuple[str | None, int | None]:
    """("stop" or "length", the stop token if one of `stop_token_ids` ended it), or (None, None) if it goes on."""
    last, eos = sequence.token_ids[-1], sequence.eos_token_id
    ends = last == eos or last in sequence.stop_token_ids
    if ends and sequence.num_output_tokens >= sequence.params.min_tokens:
        return "stop", None if last == eos else last
    if sequence.matcher is not None and sequence.matcher.complete:
        return "stop", None
    if len(sequence.token_ids) >= sequence.longest:
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


def append_plain(sequences: Sequence_[Sequence], token_ids: Sequence_[int], now: float) -> list[int]:
    """Append its token to each sequence to which nothing else happens; returns the indices of all others.

    Those are unchanged: what has no token (`NO_TOKEN`), has ended or may end now, or is not within `plain_end`.
    """
    others = []
    for i, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
        known = sequence.token_ids
        if (
            len(known) >= sequence.plain_end
            or token_id < 0
            or token_id == sequence.eos_token_id
            or token_id in sequence.stop_token_ids
        ):
            others.append(i)
            continue
        known.append(token_id)
        sequence.num_in_flight -= 1
        sequence.num_pending -= 1
        sequence.token_gap = now - sequence.last_token_time
        sequence.last_token_time = now
        sequence.tenant.num_output_tokens += 1
    return others
