"""How a session starts, and what becomes of it when its core is lost."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from pagewire.frontend.core import open_session
from pagewire.frontend.core.mailbox import Inbox
from pagewire.frontend.core.session import Session
from pagewire.frontend.core.spawned_cores import tokenizer_ahead
from pagewire.frontend.requests.outputs import RequestOutput
from pagewire.frontend.text import tokenizer as tokenizer_module
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.ipc.errors import EngineDeadError
from pagewire.ipc.options.engine_args import EngineArgs
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import LogprobRows
from pagewire.ipc.wire.messages import EngineInfo, Hello, Refused, Request, Submit
from pagewire.ipc.wire.params import RequestOutputKind, SamplingParams
from tests.frontend.conftest import FakeCore


@pytest.fixture
def attach(tmp_path: Path) -> Iterator[Callable[[float], Session]]:
    """Attaches to the fake core, which is there by then."""
    sessions: list[Session] = []

    def attach(reattach_timeout: float) -> Session:
        sessions.append(
            open_session.attach(
                f"ipc://{tmp_path}/core.sock",
                curve=None,
                tokenizer=None,
                timeout=10,
                reattach_timeout=reattach_timeout,
            )
        )
        return sessions[-1]

    yield attach
    for session in sessions:
        session.close()


@pytest.mark.parametrize(
    ("given", "loaded", "revision"), [(None, "org/model", "v2"), ("org/tokenizer", "org/tokenizer", None)]
)
def test_the_revision_is_that_of_the_engines_tokenizer(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine_info: EngineInfo,
    given: str | None,
    loaded: str,
    revision: str | None,
) -> None:
    calls: list[tuple[str, str | None]] = []

    def load(name: str, mode: str, *, revision: str | None, trust_remote_code: bool) -> None:
        calls.append((name, revision))

    monkeypatch.setattr(open_session, "load_tokenizer", load)
    info = msgspec.structs.replace(engine_info, tokenizer="org/model", tokenizer_revision="v2")
    core = FakeCore(f"ipc://{tmp_path}/core.sock", info)
    open_session.attach(core.address, curve=None, tokenizer=given, timeout=10).close()
    core.close()
    assert calls == [(loaded, revision)]


@pytest.mark.parametrize("trust", [False, True])
def test_the_code_of_a_cores_tokenizer_runs_only_if_this_frontend_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine_info: EngineInfo, trust: bool
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["code.Tokenizer", null]}}')
    with_code: list[bool] = []

    def load_wrapped(folder: Path, config: dict[str, object], trust_remote_code: bool) -> Tokenizer:
        with_code.append(trust_remote_code)
        return load_tokenizer(engine_info.tokenizer)

    monkeypatch.setattr(tokenizer_module, "load_wrapped", load_wrapped)
    info = msgspec.structs.replace(engine_info, tokenizer=str(folder), trust_remote_code=True)
    core = FakeCore(f"ipc://{tmp_path}/core.sock", info)
    session = open_session.attach(
        core.address, curve=None, tokenizer=None, timeout=10, trust_remote_code=trust
    )
    session.close()
    core.close()
    assert with_code == [trust]


def begin(session: Session, core: FakeCore, inbox: Inbox) -> Request:
    """A request that has got two tokens."""
    params = SamplingParams(max_tokens=4, temperature=0.0)
    session.submit([session.intake.prepare({"prompt_token_ids": [5, 6]}, params, "a request")], inbox)
    [request] = core.expect(Submit).requests
    core.tokens(request.key, [7, 8])
    [state] = inbox.get()
    assert state.output_token_ids == [[7, 8]]
    return request  # type: ignore[no-any-return]


def test_open_requests_go_on_with_another_core(
    new_core: Callable[..., FakeCore], attach: Callable[[float], Session]
) -> None:
    first, inbox = new_core(), Inbox()
    session = attach(60)
    begin(session, first, inbox)
    first.close()
    while session.dead is None:
        pass
    with pytest.raises(EngineDeadError):
        begin(session, first, inbox)
    second = new_core()
    [request] = second.expect(Submit).requests
    assert request.output_token_ids == [[7, 8]]
    second.tokens(request.key, [9, 10], finish_reason="length")
    [state] = inbox.get()
    assert (state.output_token_ids, state.finished, session.dead) == ([[7, 8, 9, 10]], True, None)
    begin(session, second, inbox)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_prompt_logprobs_are_not_requested_again_of_another_core(
    new_core: Callable[..., FakeCore], attach: Callable[[float], Session], kind: RequestOutputKind
) -> None:
    """Two of three positions have arrived, and an output with them has been taken."""
    first, inbox = new_core(), Inbox()
    session = attach(60)
    params = SamplingParams(max_tokens=4, prompt_logprobs=0, output_kind=kind)
    session.submit([session.intake.prepare({"prompt_token_ids": [5, 6, 7, 8]}, params, "a request")], inbox)
    [request] = first.expect(Submit).requests
    assert request.num_prompt_logprobs == 0
    first.tokens(request.key, [], prompt_logprobs=logprob_rows([6, 7]))
    first.tokens(request.key, [9])
    found: list[int] = []
    while 9 not in (state := inbox.get()[0]).output_token_ids[0]:
        pass
    found += positions(session.take(state))
    first.close()
    second = new_core()
    [request] = second.expect(Submit).requests
    assert (request.num_prompt_logprobs, request.output_token_ids) == (2, [[9]])
    second.tokens(request.key, [10], prompt_logprobs=logprob_rows([8]), finish_reason="length")
    [state] = inbox.get()
    last = positions(session.take(state))
    assert (found + last if kind is RequestOutputKind.DELTA else last) == [6, 7, 8]


def logprob_rows(token_ids: list[int]) -> LogprobRows:
    n = len(token_ids)
    return LogprobRows(
        Tensor("int32", (n, 1), struct.pack(f"<{n}i", *token_ids)),
        Tensor("float32", (n, 1), struct.pack(f"<{n}f", *[-1.0] * n)),
        Tensor("int32", (n,), struct.pack(f"<{n}i", *[1] * n)),
    )


def positions(output: RequestOutput | None) -> list[int]:
    """The prompt tokens that have a log probability in an output."""
    assert output is not None
    return [token_id for entries in output.prompt_logprobs or [] if entries for token_id in entries]


def test_a_core_that_does_not_start_is_not_the_last_word(
    new_core: Callable[..., FakeCore], attach: Callable[[float], Session], tmp_path: Path
) -> None:
    first, inbox = new_core(), Inbox()
    session = attach(60)
    begin(session, first, inbox)
    first.close()
    broken = new_core()
    broken.welcomes = False
    broken.expect(Hello)
    broken.send(Refused("no model folder /x", "ModelNotFoundError"))
    broken.expect(Hello)  # the next attempt
    broken.close()
    second = new_core()
    [request] = second.expect(Submit).requests
    second.tokens(request.key, [9, 10], finish_reason="length")
    [state] = inbox.get()
    assert state.output_token_ids == [[7, 8, 9, 10]]


def test_another_model_is_no_other_core(
    new_core: Callable[..., FakeCore],
    attach: Callable[[float], Session],
    engine_info: EngineInfo,
    tmp_path: Path,
) -> None:
    first, inbox = new_core(), Inbox()
    session = attach(60)
    begin(session, first, inbox)
    first.close()
    second = FakeCore(f"ipc://{tmp_path}/core.sock", msgspec.structs.replace(engine_info, model="bigger"))
    [state] = inbox.get()
    second.close()
    with pytest.raises(EngineDeadError, match="the new one serves another model, bigger"):
        session.take(state)


@pytest.mark.parametrize("reattach_timeout", [0, 0.1])
def test_no_other_core_comes(
    new_core: Callable[..., FakeCore], attach: Callable[[float], Session], reattach_timeout: float
) -> None:
    core, inbox = new_core(), Inbox()
    session = attach(reattach_timeout)
    begin(session, core, inbox)
    core.close()
    [state] = inbox.get()
    with pytest.raises(EngineDeadError, match="the engine core closed the connection"):
        session.take(state)
    with pytest.raises(EngineDeadError):
        begin(session, core, inbox)


def test_closing_does_not_wait_for_another_core(
    new_core: Callable[..., FakeCore], attach: Callable[[float], Session]
) -> None:
    core, inbox = new_core(), Inbox()
    session = attach(1000)
    begin(session, core, inbox)
    core.close()
    session.close()
    [state] = inbox.get()
    with pytest.raises(EngineDeadError):
        session.take(state)


def test_the_tokenizer_of_a_folder_is_loaded_while_the_core_starts(tmp_path: Path) -> None:
    for options in (
        {"model": "somebody/model"},
        {"skip_tokenizer_init": True},
        {"tokenizer": "demo", "tokenizer_revision": "main"},
    ):
        assert tokenizer_ahead(EngineArgs(**options), {}) is None
    ahead = tokenizer_ahead(EngineArgs(), {})
    assert ahead is not None and ahead.result().encode("A") == load_tokenizer("demo").encode("A")
    broken = tokenizer_ahead(EngineArgs(tokenizer=str(tmp_path)), {})
    assert broken is not None and isinstance(broken.exception(), ValueError)
