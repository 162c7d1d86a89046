"""A worker without a model: the next token is a pure function of the tokens so far and the seed.

It keeps slots and the relay as a real one does, so a core that plans wrongly gets wrong tokens. A step while it is
asleep ends it. Some tokens of a prompt, and files, make it fail:

    CRASH               kills it, as long as the file named by $CRASH_WHILE exists
    CRASH_AFTER_A_STEP  likewise, but in the step after
    HANG                stops it
    FAIL                gives the row an error

An adapter is a folder with a file `adapter_config.json`, an object whose fields are those of its `AdapterLoaded`;
with "slow" it is answered only when `finish_loads` is called, "crash" kills the worker, and "hang" stops it. The
next token depends on the file's content, too. Likewise on the files of weights that take the place of its own.

It stops at its start while the file named by $HANG_WHILE_STARTING exists.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import zmq

from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.ipc.join.group_key import GroupKey
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.lora import AdapterLoaded, DropAdapter, LoadAdapter
from pagewire.ipc.wire.messages import PROTOCOL
from pagewire.ipc.wire.sockets import connect_dealer, receive, send
from pagewire.ipc.wire.steps import Masks, Row, RowResult, StepPlan, StepResult
from pagewire.ipc.wire.tasks import restore_tasks
from pagewire.ipc.wire.worker_messages import (
    Ready,
    Shutdown,
    ToWorker,
    WorkerCall,
    WorkerConfig,
    WorkerFailed,
    WorkerHello,
    WorkerReply,
)

VOCAB_SIZE = 1000
EMBEDDING_SIZE = 4
EOS = 999
CRASH = 998
HANG = 997
FAIL = 996
CRASH_AFTER_A_STEP = 995
WEIGHTS = [["v", "F32", [2, 2]], ["w", "F32", [4]]]


def next_token(token_ids: Sequence[int], seed: int, adapter: bytes = b"") -> int:
    """The token after `token_ids`: any but the special ones. adapter: content of the adapter."""
    digest = sha256(repr((list(token_ids), seed)).encode() + adapter).digest()
    return int.from_bytes(digest[:4], "little") % CRASH_AFTER_A_STEP


def weights_content(tensors: dict[str, bytes]) -> bytes:
    """What tokens depend on where these tensors were given; empty without any."""
    return sha256(repr(sorted(tensors.items())).encode()).digest() if tensors else b""


def allowed_from(token_id: int, mask: bytes) -> int | None:
    """The first token from `token_id` on, around the end, that a mask allows."""
    order = [*range(token_id, VOCAB_SIZE), *range(token_id)]
    return next((i for i in order if mask[i // 8] >> i % 8 & 1), None)


def mask_rows(masks: Masks | None) -> dict[int, bytes]:
    """The mask of each sample of the plan that has one."""
    if masks is None:
        return {}
    data, width = bytes(masks.bits.data), 4 * masks.bits.shape[1]
    return {sample: data[i * width : (i + 1) * width] for i, sample in enumerate(masks.samples)}


def logprob_rows(token_id: int, count: int | None) -> LogprobRows | None:
    """Log probabilities at one position, all zero, if there are to be any."""
    if count is None:
        return None
    width = 1 + count
    return LogprobRows(
        Tensor("int32", (1, width), token_id.to_bytes(4, "little") * width),
        Tensor("float32", (1, width), bytes(4 * width)),
        Tensor("int32", (1,), (1).to_bytes(4, "little")),
    )


class FakeWorker:
    """Slots with token histories; answers plans."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.num_logprobs: dict[int, int | None] = {}
        self.sampled: list[int] = []
        self.states: dict[int, list[int]] = {}  # the tokens that each state slot is behind
        self.num_embeddings = 0
        self.asleep: set[str] = set()
        self.doomed = False  # the next step ends this process
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.passes_on = False  # it is a stage before the last
        self.adapters: dict[int, bytes] = {0: b""}  # contents by index
        self.slow: list[AdapterLoaded] = []
        self.adapter_of: dict[int, int] = {}  # by slot
        self.weights = b""

    def use_weights(self, paths: Sequence[str]) -> None:
        """Let tokens depend on the tensors of these files, the last file's first."""
        tensors: dict[str, bytes] = {}
        for path in paths:
            data = Path(path).read_bytes()
            begin = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:begin]).items():
                first, last = entry["data_offsets"]
                tensors[name] = data[begin + first : begin + last]
        self.weights = weights_content(tensors)

    def load(self, order: LoadAdapter) -> list[AdapterLoaded]:
        """What there is to say of an adapter now."""
        try:
            text = (Path(order.path) / "adapter_config.json").read_bytes()
            fields = json.loads(text)
        except (OSError, ValueError) as error:
            return [AdapterLoaded(order.index, error=f"cannot read it: {error}", error_type="OSError")]
        content, is_slow = sha256(text).digest(), fields.pop("slow", False)
        for event, number in (("crash", signal.SIGKILL), ("hang", signal.SIGSTOP)):
            if fields.pop(event, False):
                os.kill(os.getpid(), number)
        if order.content not in (b"", content):
            return [AdapterLoaded(order.index, error="the file was replaced", error_type="ValueError")]
        loaded = AdapterLoaded(order.index, content, **{"num_bytes": 100, "rank": 8, **fields})
        if loaded.error is None:
            self.adapters[order.index] = content
        if is_slow:
            self.slow.append(loaded)
            return []
        return [loaded]

    def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a method that the core calls."""
        if method == "ping":
            return "pong"
        if method == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if method == "echo":
            return args
        if method == "finish_loads":
            return len(self.slow)
        if method == "sampled":
            return self.sampled
        if method == "num_embeddings":
            return self.num_embeddings
        if method == "num_adapters":
            return len(self.adapters) - 1
        if method == "weight_tensors":
            return WEIGHTS
        if method == "weights":
            return self.weights
        if method == "load_weights":
            self.tokens.clear()
            return self.use_weights([path for path, _ in kwargs["files"]])
        if method == "asleep":
            return sorted(self.asleep)
        if method == "sleep":
            self.asleep |= {"kv_cache"} if kwargs["tags"] == ["kv_cache"] else {"weights", "kv_cache"}
        elif method == "wake_up":
            self.asleep -= {"weights"}
            if kwargs["tags"] is None or "kv_cache" in kwargs["tags"]:
                self.asleep -= {"kv_cache"}
        else:
            raise ValueError(f"no method {method!r}")
        return None

    def step(self, plan: StepPlan, masks: Masks | None) -> StepResult:
        assert not self.asleep
        allowed = mask_rows(masks)
        for slot in plan.freed_slots:
            self.tokens.pop(slot, None)
        restore_tasks(plan.inits)
        for init in plan.inits:
            self.tokens[init.slot] = list(init.token_ids)
            self.seeds[init.slot] = init.seed
            assert init.adapter in self.adapters
            self.adapter_of[init.slot] = init.adapter
            self.num_logprobs[init.slot] = getattr(init.task, "logprobs", None)
        self.num_embeddings += sum(medium.data.shape[0] for row in plan.rows for medium in row.media)
        result = StepResult(plan.step_id, [])
        if self.passes_on:
            for row in plan.rows:
                self.tokens[row.slot] += row.token_ids
                self.sampled += row.token_ids
                assert row.start + row.num_tokens <= len(self.tokens[row.slot]), "a token is not known here"
            return result
        num_samples = 0
        for row in plan.rows:
            mask = allowed.get(num_samples)
            num_samples += row.num_samples
            result.rows.append(self.run(row, mask))
        return result.by_columns()

    def run(self, row: Row, mask: bytes | None) -> RowResult:
        tokens, result = self.tokens[row.slot], RowResult()
        if row.states:
            assert self.states.get(row.state, []) == tokens[: row.start], "states of other tokens"
            self.states |= {slot: tokens[:end] for end, slot in row.states}
        self.obey(tokens[row.start : row.start + row.num_tokens], result)
        if row.num_samples:
            adapter = self.adapters[self.adapter_of[row.slot]]
            history = tokens[: row.start + row.num_tokens]
            token_id: int | None = next_token(history, self.seeds[row.slot], adapter + self.weights)
            if mask is not None and token_id is not None:
                token_id = allowed_from(token_id, mask)
                if token_id is None:
                    result.error = "nothing is allowed"
            tokens.append(token_id or 0)
            self.sampled.append(token_id or 0)
            result.token_ids = [token_id or 0]
            result.logprobs = logprob_rows(token_id or 0, self.num_logprobs[row.slot])
        return result

    def obey(self, token_ids: Sequence[int], result: RowResult) -> None:
        if CRASH in token_ids and Path(os.environ.get("CRASH_WHILE", "/")).exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in token_ids:
            os.kill(os.getpid(), signal.SIGSTOP)
        if CRASH_AFTER_A_STEP in token_ids or self.doomed:
            if self.doomed and Path(os.environ.get("CRASH_WHILE", "/")).exists():
                self.context.destroy(linger=10_000)  # the result of the step before has gone
                os.kill(os.getpid(), signal.SIGKILL)
            self.doomed = True
        if FAIL in token_ids:
            result.error = "token 996 is unlucky"


def awaited(fd: int) -> str:
    """The identity of a worker that was started ahead."""
    with os.fdopen(fd) as pipe:
        if name := pipe.read():
            return name
    raise SystemExit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect", required=True)
    parser.add_argument("--identity")
    parser.add_argument("--identity-from", type=int)
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--key", type=Path)
    parser.add_argument("--progress", action="store_true", help="a worker shows it; this one has none")
    parser.add_argument("--num-blocks", type=int, default=64)
    parser.add_argument("--num-states", type=int, default=0)
    parser.add_argument("--lose-states", default="/nowhere", help="half of them while this file exists")
    parser.add_argument("--refuse", default="")
    parser.add_argument("--refuse-as", default="ValueError")
    parser.add_argument("--lack-memory", default="/nowhere", help="do while this file exists")
    parser.add_argument("--rank-1", type=json.loads, default={}, help="other fields of its Ready")
    parser.add_argument("--fail", nargs=2, action="append", default=[], help="RANK METHOD")
    options = parser.parse_args()
    if Path(os.environ.get("HANG_WHILE_STARTING", "/nowhere")).exists():
        os.kill(os.getpid(), signal.SIGSTOP)
    die_with_parent(options.lifeline)
    identity = options.identity or awaited(options.identity_from)
    rank = identity.rpartition("-")[-1]
    keys = None if options.key is None else GroupKey.read(options.key).worker
    worker = FakeWorker()
    socket = connect_dealer(worker.context, options.connect, identity.encode(), keys)
    codec: Codec[ToWorker] = Codec(ToWorker)
    early: list[ToWorker] = []
    send(socket, codec.encode(WorkerHello(PROTOCOL, os.getpid())))
    while True:
        message = early.pop(0) if early else codec.decode(receive(socket))
        if isinstance(message, WorkerConfig):
            if Path(options.lack_memory).exists():
                failed = WorkerFailed("too large for now", fatal=True, lacks_memory=True)
                send(socket, codec.encode(failed))
                socket.close(500)
                raise SystemExit(1)
            if options.refuse:
                failed = WorkerFailed(options.refuse, fatal=True, error_type=options.refuse_as)
                send(socket, codec.encode(failed))
                socket.close(500)
                raise SystemExit(1)
            worker.use_weights([file.path for file in message.weights])
            place = message.parallel
            worker.passes_on = int(rank) // place.num_shards < place.stages - 1
            length = message.max_model_len or 128
            ready = Ready("Fake", "float32", "cpu", VOCAB_SIZE, length, options.num_blocks, 1, 1)
            ready.embedding_size = EMBEDDING_SIZE
            ready.num_states = options.num_states >> Path(options.lose_states).exists()
            ready.bytes_per_state = 2 if ready.num_states else 0
            if rank == "1":
                ready = msgspec.structs.replace(ready, **options.rank_1)
            send(socket, codec.encode(ready))
        elif isinstance(message, StepPlan):
            masks = None
            while message.masked and masks is None and not worker.passes_on:
                later = codec.decode(receive(socket))
                if isinstance(later, Masks):
                    assert later.step_id == message.step_id
                    masks = later
                else:
                    early.append(later)
            send(socket, codec.encode(worker.step(message, masks)))
        elif isinstance(message, Masks):
            raise AssertionError("masks came that this worker does not wait for")
        elif isinstance(message, WorkerCall):
            try:
                if [rank, message.method] in options.fail:
                    raise OSError(f"{message.method} failed in rank {rank}")
                result = worker.call(message.method, message.args, message.kwargs)
                answer = WorkerReply(message.call_id, result)
            except Exception as error:
                answer = WorkerReply(message.call_id, error=str(error), error_type=type(error).__name__)
            send(socket, codec.encode(answer))
            if message.method == "finish_loads":
                for loaded in worker.slow:
                    send(socket, codec.encode(loaded))
                worker.slow = []
        elif isinstance(message, LoadAdapter) and [rank, "load_adapter"] in options.fail:
            send(socket, codec.encode(AdapterLoaded(message.index, error="no such folder")))
        elif isinstance(message, LoadAdapter):
            for loaded in worker.load(message):
                send(socket, codec.encode(loaded))
        elif isinstance(message, DropAdapter):
            worker.adapters.pop(message.index, None)
        elif isinstance(message, Shutdown):
            return


if __name__ == "__main__":
    main()
