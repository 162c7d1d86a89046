"""When a sequence ends in the core: end of sequence, stop tokens, a complete grammar, length.

(Stop strings need text, which only the frontend has: it aborts the sequence.)
"""

from __future__ import annotations

from pagewire.engine_core.schedule.sequence import Sequence


def stop_ids(request: Sequence) -> list[int]:
    """Tokens that end the sequence, and that `min_tokens` holds back."""
    ids = list(request.params.stop_token_ids or [])
    if request.eos_token_id is not None and not request.params.ignore_eos:
        ids.append(request.eos_token_id)
    if request.matcher is not None and not request.params.ignore_eos:
        ids += (i for i in request.matcher.eos_token_ids if i not in ids)
    return ids


def finish_reason(request: Sequence) -> tuple[str | None, int | None]:
    """Why the sequence ends with its last token ("stop", "length" or None), and the stop token, if any."""
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
