"""What a frontend that does not read is sent later."""

from __future__ import annotations

from typing import Any

from pagewire.engine_core.clients.backlog import DELTA_BYTES, PIECE_BYTES, TOKEN_BYTES, Backlog
from pagewire.ipc.messages import Deltas, TokenDelta

NUM_TOKENS = PIECE_BYTES // 4 // TOKEN_BYTES


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
    assert backlog.num_bytes == before > 100 * (DELTA_BYTES + NUM_TOKENS * TOKEN_BYTES)
    backlog.add(TokenDelta(0, 0, [8], finish_reason="length"))
    assert next(backlog.deltas).token_ids[-1] == 8
