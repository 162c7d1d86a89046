"""The ends of a sequence that the core detects: end of sequence, stop tokens, a complete grammar, length.

Stop strings are detected by the frontend, which alone has text; it then aborts the sequence.
"""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence


def stop_ids(request: Sequence) -> list[int]:
    """Tokens that end the sequence, which the sampler excludes until `min_tokens` are generated."""
    ids = list(request.params.stop_token_ids or [])
    if request.eos_token_id is not None and not request.params.ignore_eos:
        ids.append(request.eos_token_id)
    if request.matcher is not None and not request.params.ignore_eos:
        ids += (i for i in request.matcher.eos_token_ids if i not in ids)
    return ids


def finish_reason(request: Sequence) -> tuple[str | None, int | None]:
    """("stop" or "length", the stop token if one of `stop_token_ids` ended it), or (None, None) if it goes on."""
    last, params = request.token_ids[-1], request.params
    if request.num_output_tokens >= params.min_tokens:
        if last == request.eos_token_id and not params.ignore_eos:
            return "stop", None
        if params.stop_token_ids and last in params.stop_token_ids:
            return "stop", last
    if request.matcher is not None and request.matcher.complete:
        return "stop", None
    if request.num_output_tokens >= request.max_output:
        return "length", None
    return None, None
