"""A worker that computes nothing and answers at once, to measure the core: every token is `TOKEN_ID`.

python benchmarks/instant_worker.py --connect ADDRESS --identity NAME --lifeline FD --num-blocks N
"""

from __future__ import annotations

import argparse
import os

import zmq

from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.ipc.wire.codec import Codec
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.sockets import connect_dealer, receive, send
from pagewire.ipc.wire.worker_messages import (
    Ready,
    RowResult,
    Shutdown,
    StepPlan,
    StepResult,
    ToWorker,
    WorkerCall,
    WorkerConfig,
    WorkerHello,
    WorkerReply,
)

VOCAB_SIZE = 32_000
TOKEN_ID = 5
SAMPLED, NOTHING = RowResult([TOKEN_ID]), RowResult()


def main() -> None:
    """Answer the core until it says that this is over."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--num-blocks", type=int, required=True)
    options = parser.parse_args()
    die_with_parent(options.lifeline)
    socket = connect_dealer(zmq.Context(), options.connect, options.identity.encode())
    codec: Codec[ToWorker] = Codec(ToWorker)
    send(socket, codec.encode(WorkerHello(PROTOCOL, os.getpid())))
    while not isinstance(message := codec.decode(receive(socket)), Shutdown):
        if isinstance(message, StepPlan):
            rows = [SAMPLED if row.num_samples else NOTHING for row in message.rows]
            send(socket, codec.encode(StepResult(message.step_id, rows).by_columns()))
        elif isinstance(message, WorkerConfig):
            length = message.max_model_len or 0
            ready = Ready("Instant", "float32", "cpu", VOCAB_SIZE, length, options.num_blocks, 1, 1)
            send(socket, codec.encode(ready))
        elif isinstance(message, WorkerCall):
            send(socket, codec.encode(WorkerReply(message.call_id, "pong")))


if __name__ == "__main__":
    main()
