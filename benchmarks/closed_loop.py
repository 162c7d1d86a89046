"""Requests on a session in a closed loop: as one ends, the next is submitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagewire.frontend.core.session import Session


def run_requests(
    session: Session, num_requests: int, *, num_open: int, prompt_tokens: int, output_tokens: int
) -> int:
    """Run requests with different prompts to their ends, `num_open` at a time; the number of tokens that came back.

    prompt_tokens, output_tokens: of each request, which goes on past an end of sequence.
    """
    from pagewire.frontend.core.mailbox import Inbox
    from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams

    params = SamplingParams(
        max_tokens=output_tokens, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    inbox, unfinished, number, num_tokens = Inbox(), set[int](), 0, 0
    while number < num_requests or unfinished:
        while number < num_requests and len(unfinished) < num_open:
            prompt: Any = {"prompt_token_ids": [number % 900 + 10] * prompt_tokens}
            (state,) = session.submit([session.intake.prepare(prompt, params, f"{number}")], inbox)
            unfinished.add(state.key)
            number += 1
        for state in inbox.get():
            output = session.take(state)
            num_tokens += 0 if output is None else sum(len(each.token_ids) for each in output.outputs)
            if state.finished:
                unfinished.discard(state.key)
    return num_tokens
