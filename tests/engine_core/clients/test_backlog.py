"""What a frontend that does not read is sent later."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagewire.engine_core.clients.backlog import DELTA_BYTES, PIECE_BYTES, Backlog, merge
from pagewire.ipc.wire.budget import VALUE_BYTES
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import LogprobRows, RetainedPrefix
from pagewire.ipc.wire.messages import Deltas
from pagewire.ipc.wire.requests import RequestTiming, TokenDelta

NUM_TOKENS = PIECE_BYTES // 4 // VALUE_BYTES


def filled(num_keys: int) -> tuple[Backlog, list[Deltas]]:
    """A backlog of requests of a quarter of a piece each, and what it encodes."""
    encoded: list[Deltas] = []

    def encode(message: Deltas) -> list[Any]:
        encoded.append(message)
        return [b"piece"]

    backlog = Backlog(encode)
    for key in range(num_keys):
        backlog.add(TokenDelta(key, 0, [7] * NUM_TOKENS))
    backlog.add_answer([b"answer"])
    return backlog, encoded


def test_it_is_sent_in_pieces_and_then_answers() -> None:
    backlog, encoded = filled(10)
    sent: list[Any] = []
    backlog.send(lambda frames: sent.append(frames) is None)
    assert sent == [[b"piece"], [b"piece"], [b"piece"], [b"answer"]]
    assert [delta.key for message in encoded for delta in message.deltas] == list(range(10))
    assert not backlog and backlog.num_bytes == 0


def test_no_more_than_a_piece_is_encoded_in_vain() -> None:
    backlog, encoded = filled(100)
    before = backlog.num_bytes
    backlog.send(lambda frames: False)
    assert len(encoded) == 1 and len(encoded[0].deltas) < 6
    assert backlog.num_bytes == before > 100 * (DELTA_BYTES + NUM_TOKENS * VALUE_BYTES)
    backlog.add(TokenDelta(0, 0, [8], finish_reason="length"))
    assert next(backlog.deltas).token_ids[-1] == 8


def test_nothing_is_lost_when_deltas_are_merged() -> None:
    first = TokenDelta(
        *(1, 0, [5]),
        logprobs=rows(5),
        prompt_logprobs=rows(4),
        num_cached_tokens=16,
        timing=RequestTiming(1.0, 2.0, 3.0, 4.0),
        num_drafts=4,
        num_accepted=1,
        adapter=b"content",
    )
    second = TokenDelta(*(1, 0, [6, 7]), "stop", 7, logprobs=rows(6, 7), num_drafts=2, num_accepted=1)
    second.retained = [RetainedPrefix(64, 300.0)]
    first.weights, second.weights = [(1, "1")], [(1, "1"), (2, "2")]
    both = merge(first, second)
    assert both == TokenDelta(
        *(1, 0, [5, 6, 7], "stop", 7),
        logprobs=rows(5, 6, 7),
        prompt_logprobs=rows(4),
        num_cached_tokens=16,
        timing=first.timing,
        num_drafts=6,
        num_accepted=2,
        adapter=b"content",
        retained=second.retained,
        weights=second.weights,
    )
    unset = {name for name in both.__struct_fields__ if getattr(both, name) in (None, 0, b"", [])}
    assert unset == {"index", "pooled", "error", "error_type", "error_place"}  # a new field is merged, too


def rows(*token_ids: int) -> LogprobRows:
    """The log probabilities of these tokens alone."""
    ids = np.array([token_ids], np.int32).T
    logprobs, ranks = np.zeros(ids.shape, np.float32), np.ones(len(ids), np.int32)
    return LogprobRows(*(Tensor(str(x.dtype), x.shape, x.tobytes()) for x in (ids, logprobs, ranks)))
