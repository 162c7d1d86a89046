"""The ends of a sequence that the core detects: end of sequence, stop tokens, a complete grammar, length.

Stop strings are detected by the frontend, which alone has text; it then aborts the sequence.
"""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence


def stop_ids(sequence: Sequence) -> list[int]:
    """Tokens that end the sequence, which the sampler excludes until `min_tokens` are generated; then none."""
    params, eos_token_id = sequence.params, sequence.request.eos_token_id
    if sequence.num_output_tokens >= params.min_tokens:
        return []
    ids = list(params.stop_token_ids or [])
    if eos_token_id is not None and not params.ignore_eos:
        ids.append(eos_token_id)
    if sequence.matcher is not None and not params.ignore_eos:
        ids += (i for i in sequence.matcher.eos_token_ids if i not in ids)
    return ids


def finish_reason(sequence: Sequence) -> tuple[str | None, int | None]:
    """("stop" or "length", the stop token if one of `stop_token_ids` ended it), or (None, None) if it goes on."""
    last, params = sequence.token_ids[-1], sequence.params
    if sequence.num_output_tokens >= params.min_tokens:
        if last == sequence.request.eos_token_id and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and last in params.stop_token_ids:
            return "stop", last
    if sequence.matcher is not None and sequence.matcher.complete:
        return "stop", None
    if sequence.num_output_tokens >= sequence.max_output:
        return "length", None
    return None, None
