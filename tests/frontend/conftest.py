"""A fake core that speaks the protocol of a real one, for tests of frontends."""

from __future__ import annotations

import array
import contextlib
import itertools
import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.host.gate import Gate
from pagewire.ipc.wire.codec import Codec, Tensor
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    Call,
    CallAnswer,
    Deltas,
    EngineInfo,
    Hello,
    Ping,
    Pong,
    Refused,
    Request,
    Submit,
    ToCore,
    TokenDelta,
    Welcome,
)
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.sockets import CurveKeys, bind_router, receive, send
from pagewire.ipc.wire.tasks import submitted
from tests.frontend import trained

EOS = 0
PATIENCE = 20.0
VOCAB = {"</s>": EOS, "<unk>": 1} | {f"w{i}": i for i in range(2, 64)}


HEALTHY = {"alive": True, "ready": True, "reason": ""}


def vector(token_ids: list[int]) -> Tensor:
    """A vector [2] that tells prompts apart."""
    values = array.array("f", [float(len(token_ids)), float(sum(token_ids))])
    return Tensor("float32", (2,), values.tobytes())


class FakeCore:
    """A thread with a bound ROUTER. `auto`: it answers each request by itself with `answer(request, index)`, or
    with `pooled(request)`.

    seen: every message that came, in order, but for pings. pings: the pings. A test sends messages with `send`.
    """

    def __init__(self, address: str, info: EngineInfo, curve: CurveKeys | None = None) -> None:
        self.address, self.info = address, info
        self.auto = False
        self.welcomes = True
        self.pongs = True
        self.fences = True  # whether it takes requests as soon as they come
        self.answer: Callable[[Request, int], list[int]] = lambda request, index: [2, 3, 4]
        self.reason = "length"  # finish reason of all answers
        self.logprobs: Callable[[Request], LogprobRows | None] = lambda request: (
            None
        )  # of each token of an answer
        self.pooled: Callable[[Request], Tensor] = lambda request: vector(request.prompt.token_ids)
        self.calls: dict[str, Callable[..., Any]] = {"check_health": lambda: HEALTHY}
        self.seen: queue.Queue[Any] = queue.Queue()
        self.pings: queue.Queue[Ping] = queue.Queue()
        self.submitted: dict[int, Request] = {}
        self.client = b""
        self._outbox: queue.Queue[Any] = queue.Queue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gate(self._context, lambda peer: "frontend")
        self._gate.start()
        self._socket = bind_router(self._context, address, curve)
        self._codec: Codec[ToCore] = Codec(ToCore)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def expect(self, kind: type) -> Any:
        """The next message of this kind; others before it are dropped."""
        while not isinstance(message := self.seen.get(timeout=PATIENCE), kind):
            pass
        return message

    def send(self, message: Any) -> None:
        """Send to the client that attached last."""
        self._outbox.put(message)

    def tokens(self, key: int, token_ids: list[int], index: int = 0, **more: Any) -> None:
        """Send one delta."""
        self.send(by_columns([TokenDelta(key, index, token_ids, **more)]))

    def deltas(self, deltas: list[TokenDelta]) -> None:
        """Send several as one step."""
        self.send(by_columns(deltas))

    def close(self) -> None:
        """Vanish, as a killed core does."""
        self._stop.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._stop.is_set():
            while not self._outbox.empty():
                self._reply(self._outbox.get())
            if self._socket.poll(2):
                self.client, *frames = receive(self._socket)  # type: ignore[assignment]
                self._take(self._codec.decode(frames))
        self._gate.stop()
        self._context.destroy(linger=0)

    def _reply(self, message: Any) -> None:
        if self._stop.is_set():
            return  # a core that has vanished sends nothing
        with contextlib.suppress(zmq.ZMQError):  # the frontend has gone meanwhile
            send(self._socket, [self.client, *self._codec.encode(message)])

    def _take(self, message: ToCore) -> None:
        if isinstance(message, Ping):
            self.pings.put(message)
            if self.pongs:
                self._reply(Pong())
            return
        if isinstance(message, Hello):
            self._handshake(message)
        elif isinstance(message, Call):
            if message.method != "fence":
                self._reply(self._called(message))
            elif self.fences:
                self._reply(CallAnswer(message.call_id))
        elif isinstance(message, Submit):
            requests = submitted(message)
            self.submitted |= {request.key: request for request in requests}
            if self.auto:
                pools = [request for request in requests if isinstance(request.task, PoolingParams)]
                for request in pools:
                    self._reply(Deltas([TokenDelta(request.key, 0, [], "stop", pooled=self.pooled(request))]))
                self._generate([request for request in requests if request not in pools])
        self.seen.put(message)

    def _handshake(self, hello: Hello) -> None:
        if hello.protocol != PROTOCOL:
            self._reply(Refused(f"you speak protocol {hello.protocol}, this core {PROTOCOL}"))
        elif self.welcomes:
            self._reply(Welcome(self.info, "0", ping_seconds=0.05))

    def _called(self, call: Call) -> CallAnswer:
        try:
            return CallAnswer(call.call_id, self.calls[call.method](*call.args, **call.kwargs))
        except Exception as error:
            return CallAnswer(call.call_id, error=str(error), error_type=type(error).__name__)

    def _generate(self, requests: list[Request]) -> None:
        """All requests token by token, in steps, as a core would."""
        rows = [
            (request, index, self.answer(request, index))
            for request in requests
            for index in range(request.params.n)
        ]
        for step in itertools.count():
            deltas = [
                TokenDelta(
                    request.key,
                    index,
                    [ids[step]],
                    self.reason if step == len(ids) - 1 else None,
                    logprobs=self.logprobs(request),
                )
                for request, index, ids in rows
                if step < len(ids)
            ]
            if not deltas:
                return
            self._reply(by_columns(deltas))


def by_columns(deltas: list[TokenDelta]) -> Deltas:
    """A message with these deltas, the first ones as keys and tokens as far as they are nothing more."""
    tokens = list(itertools.takewhile(is_token, deltas))
    keys, token_ids = [delta.key for delta in tokens], [delta.token_ids[0] for delta in tokens]
    return Deltas(deltas[len(tokens) :], keys, token_ids)


def is_token(delta: TokenDelta) -> bool:
    """True if a delta has one token of the first sequence, and nothing else."""
    return len(delta.token_ids) == 1 and delta == TokenDelta(delta.key, 0, delta.token_ids)


@pytest.fixture(scope="session")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of the words w2 ... w63, and a config."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("words")
    tokenizer = Tokenizer(models.WordLevel({f"▁{w}": i for w, i in VOCAB.items()}, unk_token="▁<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": "{% for m in messages %} {{ m.content }}{% endfor %}"})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(VOCAB)}))
    return folder


@pytest.fixture
def engine_info(word_tokenizer: Path) -> EngineInfo:
    """The properties of the fake core's engine."""
    return EngineInfo(
        model="fake",
        model_path=str(word_tokenizer),
        tokenizer=str(word_tokenizer),
        served_model_names=["fake"],
        architecture="FakeForCausalLM",
        dtype="float32",
        device="cpu",
        vocab_size=len(VOCAB),
        max_model_len=4096,
        block_size=16,
        num_blocks=100,
        max_num_seqs=16,
        max_logprobs=20,
        max_n=8,
        seed=0,
        eos_token_id=EOS,
        generation_config={},
    )


@pytest.fixture
def new_core(tmp_path: Path, engine_info: EngineInfo) -> Iterator[Callable[..., FakeCore]]:
    """Makes fake cores, and ends them after the test."""
    cores: list[FakeCore] = []

    def new(name: str = "core", curve: CurveKeys | None = None) -> FakeCore:
        cores.append(FakeCore(f"ipc://{tmp_path}/{name}.sock", engine_info, curve))
        return cores[-1]

    yield new
    for core in cores:
        core.close()


@pytest.fixture
def core(new_core: Callable[..., FakeCore]) -> FakeCore:
    """One fake core."""
    return new_core()


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a trained tokenizer of each family."""
    return trained.save_all(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    """Our tokenizer of each family."""
    return {name: load_tokenizer(folder) for name, folder in folders.items()}
