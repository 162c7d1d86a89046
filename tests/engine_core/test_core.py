"""The whole core, with a fake worker process: what frontends are told, whatever dies, hangs or lies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pagewire.engine_core.clients.early import EarlyFrontends
from pagewire.engine_core.schedule.sequence import sequence_seed
from pagewire.ipc.errors import ModelNotFoundError
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media, Prompt
from pagewire.ipc.wire.messages import (
    PROTOCOL,
    Abort,
    Call,
    CallAnswer,
    CoreDying,
    Deltas,
    Detached,
    Goodbye,
    Hello,
    Ping,
    Refused,
    Submit,
    Welcome,
)
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.pooling import PoolingParams
from pagewire.ipc.wire.requests import Request
from tests.engine_core.fake_worker import CRASH, FAIL, HANG, next_token


def roll_out(prompt: list[int], count: int, seed: int = 7) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_of_the_model(start_core: Callable, overlap: bool) -> None:
    frontend = start_core(async_scheduling=overlap).frontend()
    frontend.attach()
    prompts = {key: [key, 2, 3] * (key + 1) for key in range(20)}
    for key, prompt in prompts.items():
        frontend.submit(key, prompt, max_tokens=1 + key % 5)
    frontend.finish(*[(key, 0) for key in prompts])
    for key, prompt in prompts.items():
        assert frontend.outputs[key, 0] == roll_out(prompt, 1 + key % 5)
        assert frontend.ends[key, 0].finish_reason == "length"
    status = frontend.status()
    assert status["num_free_blocks"] == status["num_blocks"]


def test_sequences_of_one_request_have_their_own_seeds(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    prompt = list(range(40))
    frontend.submit(1, prompt, n=3, max_tokens=4)
    frontend.finish((1, 0), (1, 1), (1, 2))
    for index in range(3):
        assert frontend.outputs[1, index] == roll_out(prompt, 4, sequence_seed(7, index))


def test_stop_tokens_end_in_the_core(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    expected = roll_out([5, 6], 8)
    frontend.submit(1, [5, 6], max_tokens=8, stop_token_ids=[expected[3]])
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == expected[: expected.index(expected[3]) + 1]
    assert (frontend.ends[1, 0].finish_reason, frontend.ends[1, 0].stop_reason) == ("stop", expected[3])


def test_a_frontend_must_say_hello_in_the_right_protocol(start_core: Callable) -> None:
    core = start_core()
    stranger = core.frontend("stranger")
    stranger.submit(1, [1])
    assert isinstance(told := stranger.hear(), Detached) and "not attached" in told.cause
    stranger.say(Hello(99, "9.9", 1))
    refusal = stranger.hear()
    assert isinstance(refusal, Refused) and "protocol 99" in refusal.error and "9.9" in refusal.error


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        ([], {}, "empty"),
        ([1] * 128, {}, "no room"),
        ([1000], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"logprobs": 21}, "max_logprobs"),
        ([1], {"logit_bias": {1000: 1.0}}, "outside the vocabulary"),
        ([1], {"allowed_token_ids": [1000]}, "outside the vocabulary"),
    ],
)
def test_bad_requests_get_an_error_of_their_own(
    start_core: Callable, prompt: list[int], params: dict, text: str
) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    frontend.submit(1, [5], max_tokens=3)
    frontend.submit(2, prompt, n=2, **params)
    frontend.finish((1, 0), (2, 0), (2, 1))
    assert frontend.ends[2, 0].finish_reason == "error" and text in frontend.ends[2, 0].error
    refused = [
        row for row in frontend.call("metrics").result if row["name"] == "pagewire:requests_refused_total"
    ]
    assert {row["labels"]["reason"]: row["value"] for row in refused} == {"busy": 0, "invalid": 1}
    assert frontend.outputs[1, 0] == roll_out([5], 3)


def test_a_key_in_use_is_refused_and_its_request_goes_on(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    frontend.submit(1, [HANG - 1 - FAIL], max_tokens=100)
    frontend.submit(1, [6])
    messages = []
    while (1, 0) not in frontend.ends:
        message = frontend.hear()
        if isinstance(message, Refused):
            messages.append(message.error)
        else:
            frontend.take(message)
    assert "in use" in messages[0] and len(frontend.outputs[1, 0]) == 100


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [os.urandom(64)],
        [msgspec.msgpack.encode({"type": "submit", "requests": [[1, "r", [1], {"n": -1}, 3]]})],
        [msgspec.msgpack.encode({"type": "nonsense"})],
        [b"x"] * 5000,
    ],
)
def test_foreign_frames_are_refused_and_nothing_else_is_disturbed(
    start_core: Callable, frames: list[bytes]
) -> None:
    core = start_core()
    good, bad = core.frontend("good"), core.frontend("bad")
    good.attach()
    bad.attach()
    bad.socket.send_multipart(frames)
    assert isinstance(bad.hear(), Refused)
    good.submit(1, [3, 4])
    good.finish((1, 0))
    assert good.outputs[1, 0] == roll_out([3, 4], 8)


def test_a_killed_worker_loses_no_token(start_core: Callable) -> None:
    core = start_core()
    frontend = core.frontend()
    frontend.attach()
    prompts = {key: [key + 1] * 5 for key in range(6)}
    for key, prompt in prompts.items():
        frontend.submit(key, prompt, max_tokens=100)
    for _ in range(3):
        count = sum(map(len, frontend.outputs.values()))
        while sum(map(len, frontend.outputs.values())) < count + 20:
            frontend.take(frontend.hear())
        frontend.kill_worker()
    frontend.finish(*[(key, 0) for key in prompts])
    for key, prompt in prompts.items():
        assert frontend.outputs[key, 0] == roll_out(prompt, 100)
    frontend.wait_for_start(2)


def test_a_new_worker_may_lack_memory_for_a_while(start_core: Callable, tmp_path: Path) -> None:
    """Where the first one found enough, others may have taken it since."""
    lack = tmp_path / "lack"
    core = start_core(worker_options=["--lack-memory", str(lack)])
    frontend = core.frontend()
    frontend.attach()
    lack.touch()
    frontend.kill_worker()
    frontend.wait_for_start(3)  # the second one found too little
    lack.unlink()
    frontend.submit(1, [1, 2])
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0]


def test_a_first_worker_that_lacks_memory_ends_the_core(start_core: Callable, tmp_path: Path) -> None:
    core = start_core(worker_options=["--lack-memory", str(tmp_path)])
    frontend = core.frontend()
    frontend.say(Hello(PROTOCOL, "test", os.getpid()))
    assert frontend.hear() == Refused("too large for now", "RuntimeError")
    core.thread.join(20)
    assert core.error is not None


def test_a_request_that_kills_workers_ends_alone(
    start_core: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "crash"
    flag.touch()
    monkeypatch.setenv("CRASH_WHILE", str(flag))
    frontend = start_core().frontend()
    frontend.attach()
    frontend.submit(1, [1, 2], max_tokens=50)
    frontend.submit(2, [3, CRASH], max_tokens=50)
    frontend.submit(3, [4, 5], max_tokens=50)
    frontend.finish((1, 0), (2, 0), (3, 0))
    assert frontend.ends[2, 0].finish_reason == "error" and "crashed" in frontend.ends[2, 0].error
    assert frontend.outputs[1, 0] == roll_out([1, 2], 50)
    assert frontend.outputs[3, 0] == roll_out([4, 5], 50)


def test_a_hung_worker_is_replaced(start_core: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S", "0.5")
    frontend = start_core().frontend()
    frontend.attach()
    frontend.submit(1, [1, HANG])
    frontend.submit(2, [1, 2])
    frontend.finish((1, 0), (2, 0))
    assert frontend.ends[1, 0].finish_reason == "error"
    assert frontend.outputs[2, 0] == roll_out([1, 2], 8)


def test_an_error_in_one_row_ends_that_request_alone(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    frontend.submit(1, [1, FAIL])
    frontend.submit(2, [1, 2])
    frontend.finish((1, 0), (2, 0))
    assert "unlucky" in frontend.ends[1, 0].error
    assert frontend.outputs[2, 0] == roll_out([1, 2], 8)


def test_blocks_come_back_after_abort_goodbye_and_silence(start_core: Callable) -> None:
    core = start_core(silence=1.5)
    watcher, leaver, silent = core.frontend("watcher"), core.frontend("leaver"), core.frontend("silent")
    for frontend in (watcher, leaver, silent):
        frontend.attach()
    assert watcher.call("pause", wait_for_inflight_requests=True).error is None
    for frontend in (watcher, leaver, silent):
        frontend.submit(1, [1, 2, 3], max_tokens=120)
    watcher.say(Abort(keys=[1]))
    leaver.say(Goodbye())
    while [client["name"] for client in watcher.status()["clients"]] != ["watcher"]:
        pass
    assert watcher.call("resume").error is None
    status = watcher.status()
    assert status["num_free_blocks"] == status["num_blocks"] and status["waiting"] == 0
    silent.say(Ping())  # it was stopped, for example, and goes on
    assert isinstance(silent.hear(), Detached)
    silent.say(Hello(PROTOCOL, "test", os.getpid()))
    while not isinstance(message := silent.hear(), Welcome):
        assert isinstance(message, Detached)
    assert len(silent.status()["clients"]) == 2


def test_a_slow_reader_gets_everything_in_the_end(
    start_core: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.ipc.wire.sockets.HIGH_WATER", 2)
    monkeypatch.setattr("pagewire.engine_core.clients.clients.SEND_QUEUE", 2)
    core = start_core(worker_options=["--num-blocks", "4000"])
    slow, quick = core.frontend("slow"), core.frontend("quick")
    slow.attach()
    quick.attach()
    for key in range(1, 5):  # enough to fill the kernel's socket buffers as well
        slow.submit(key, [key] * 3, n=64, max_tokens=120)
    quick.submit(1, [9, 9], max_tokens=120)
    quick.finish((1, 0))
    assert quick.outputs[1, 0] == roll_out([9, 9], 120)
    places = [(key, index) for key in range(1, 5) for index in range(64)]
    slow.finish(*places)
    assert slow.longest_delta > 1, "nothing was merged: the reader was never behind"
    for key, index in places:
        assert slow.outputs[key, index] == roll_out([key] * 3, 120, sequence_seed(7, index))


@pytest.mark.parametrize(
    ("prompt", "task", "text"),
    [
        (Prompt([8]), PoolingParams(), "does not pool"),
        (
            Prompt([8], [Media(0, 1, bytes(32), Tensor("uint8", (0,), b""))]),
            SamplingParams(),
            "takes no media",
        ),
        (
            Prompt([8], [Media(0, 1, b"cat", Tensor("float32", (1, 4), bytes(16)), True)]),
            SamplingParams(),
            "with enable_prompt_embeds",
        ),
        (Prompt([8], adapter=b"a"), SamplingParams(), "for the core to find"),
    ],
)
def test_what_the_engine_cannot_do_yet_is_refused_by_name(
    start_core: Callable, prompt: Prompt, task: SamplingParams | PoolingParams, text: str
) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    frontend.say(Submit([Request(1, "r", prompt, task, 7)]))
    frontend.finish((1, 0))
    end = frontend.ends[1, 0]
    assert text in (end.error or "") and end.error_type == "ValueError"
    frontend.submit(2, [8])
    frontend.finish((2, 0))  # and nothing else is disturbed


def test_resubmitted_requests_go_on_where_they_were(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    expected = roll_out([8, 8], 10)
    params = SamplingParams(max_tokens=10)
    frontend.say(Submit([Request(1, "r", Prompt([8, 8]), params, 7, output_token_ids=[expected[:4]])]))
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == expected[4:]


@pytest.mark.parametrize("number", [-1, 2])
def test_more_prompt_logprobs_than_positions_cannot_have_been_delivered(
    start_core: Callable, number: int
) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    params = SamplingParams(max_tokens=10, prompt_logprobs=0)
    frontend.say(Submit([Request(1, "r", Prompt([8, 8]), params, 7, num_prompt_logprobs=number)]))
    frontend.finish((1, 0))
    assert frontend.ends[1, 0].error_type == "ValueError"
    assert "num_prompt_logprobs" in frontend.ends[1, 0].error
    assert frontend.ends[1, 0].error_place == "num_prompt_logprobs"


def test_pause_ends_requests_and_holds_new_ones(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    for key in range(0, 100, 2):  # many times: the call may come before, with or after a worker's result
        frontend.submit(key, [1], max_tokens=127)
        frontend.take(frontend.hear())
        assert frontend.call("pause").error is None
        assert frontend.ends[key, 0].finish_reason in ("abort", "length")
        frontend.submit(key + 1, [2])
        assert frontend.status()["waiting"] == 1 and frontend.call("is_paused").result is True
        assert frontend.call("resume").error is None
        frontend.finish((key + 1, 0))
        assert frontend.outputs[key + 1, 0] == roll_out([2], 8)
    assert any(end.finish_reason == "abort" for end in frontend.ends.values())


def test_any_frontend_sees_and_ends_requests_of_all(start_core: Callable) -> None:
    """The worker hangs, so that nothing ends by itself."""
    core = start_core(max_num_seqs=2)
    mine, other = core.frontend("mine"), core.frontend("other")
    for frontend in (mine, other):
        frontend.attach()
    other.submit(1, [1, HANG], max_tokens=5)
    while other.status()["in_flight"] < 2:
        pass
    assert [request["phase"] for request in mine.call("requests").result] == ["prefill"]
    mine.submit(1, [3, 4, 5], n=2)
    while mine.status()["waiting"] < 2:
        pass
    rows = mine.call("requests").result
    assert [(row["frontend"], row["request_id"], row["index"]) for row in rows] == [
        ("other", "r1", 0),
        ("mine", "r1", 0),
        ("mine", "r1", 1),
    ]
    assert [row["phase"] for row in rows] == ["prefill", "waiting", "waiting"]
    assert [row["num_prompt_tokens"] for row in rows] == [2, 3, 3]
    assert all(row["num_output_tokens"] == 0 and row["seconds_since_token"] is None for row in rows)
    assert [row["frontend"] for row in mine.call("requests", 1).result] == ["other"]

    assert mine.call("abort_request", "nonsense").result == 0
    assert mine.call("abort_request", "r1", rows[1]["frontend_number"] + 99).result == 0
    assert mine.call("abort_request", "r1", rows[0]["frontend_number"]).result == 1
    other.finish((1, 0))
    assert other.ends[1, 0].finish_reason == "abort"
    assert {row["frontend"] for row in other.call("requests").result} == {"mine"}
    assert other.call("abort_request", "r1").result == 2
    mine.finish((1, 0), (1, 1))
    assert {end.finish_reason for end in mine.ends.values()} == {"abort"}
    status = mine.status()
    assert (status["num_free_blocks"], status["running"]) == (status["num_blocks"], 0)


def test_a_request_that_is_held_back_can_be_ended(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    assert frontend.call("pause").error is None
    frontend.submit(1, [1])
    assert [row["phase"] for row in frontend.call("requests").result] == ["waiting"]
    assert frontend.call("abort_request", "r1").result == 1
    frontend.finish((1, 0))
    assert frontend.ends[1, 0].finish_reason == "abort" and frontend.call("requests").result == []
    assert frontend.call("resume").error is None
    frontend.submit(2, [1])
    frontend.finish((2, 0))
    assert frontend.outputs[1, 0] == [] and frontend.outputs[2, 0] == roll_out([1], 8)


def test_cached_prefixes_are_found_until_reset(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    prompt = list(range(50))
    for key, cached in ((1, 0), (2, 48)):
        frontend.submit(key, prompt)
        frontend.finish((key, 0))
        assert frontend.ends[key, 0].num_cached_tokens == cached
    assert frontend.call("reset_prefix_cache").result is True
    frontend.submit(3, prompt, max_tokens=70)
    frontend.take(frontend.hear())
    assert frontend.call("reset_prefix_cache").result is False
    assert frontend.call("reset_prefix_cache", reset_running_requests=True).result is True
    frontend.finish((3, 0))
    assert frontend.ends[3, 0].num_cached_tokens == 0
    assert frontend.outputs[3, 0] == roll_out(prompt, 70)


def test_methods_by_name(start_core: Callable) -> None:
    frontend = start_core().frontend()
    frontend.attach()
    assert frontend.call("collective_rpc", "echo", [1, "x"]).result == [[1, "x"]]
    assert "no method" in frontend.call("collective_rpc", "eval", ["1"]).error
    assert "no method" in frontend.call("nonsense").error
    assert frontend.call("collective_rpc", "echo", kwargs={}).result == [[]]
    assert frontend.call("sleep", 3).error == "sleep: level must be 1 or 2, got 3"
    assert frontend.call("sleep", 3).error_type == "ValueError"
    for wrong in (
        frontend.call("sleep", "deeply"),
        frontend.call("sleep", 1, 2),
        frontend.call("resume", now=1),
    ):
        assert wrong.error_type == "TypeError" and wrong.error.startswith(("sleep: ", "resume: "))
    assert frontend.call("sleep").error is None and frontend.call("is_sleeping").result is True
    assert frontend.call("wake_up").error is None and frontend.call("is_sleeping").result is False
    frontend.submit(1, [1, 2])
    frontend.finish((1, 0))
    metrics = {metric["name"]: metric for metric in frontend.call("metrics").result}
    assert metrics["vllm:generation_tokens_total"]["value"] == 8
    assert metrics["vllm:time_to_first_token_seconds"]["count"] == 1


def test_a_worker_that_cannot_start_ends_the_core_with_its_cause(start_core: Callable) -> None:
    core = start_core(worker_options=["--refuse", "no such model", "--refuse-as", "ModelNotFoundError"])
    frontend = core.frontend()
    frontend.say(Hello(PROTOCOL, "test", os.getpid()))
    refusal = frontend.hear()
    assert refusal == Refused("no such model", "ModelNotFoundError")
    core.thread.join(20)
    assert type(core.error) is ModelNotFoundError and str(core.error) == "no such model"


def test_a_frontend_that_greets_after_the_worker_failed_hears_the_cause(
    start_core: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, refuse = threading.Event(), EarlyFrontends.refuse

    def refused(early: EarlyFrontends, cause: BaseException) -> bool:
        told = refuse(early, cause)
        failed.set()
        return told

    monkeypatch.setattr(EarlyFrontends, "refuse", refused)
    monkeypatch.setattr("pagewire.engine_core.core.GREETING_MS", 20_000)
    core = start_core(worker_options=["--refuse", "no such model", "--refuse-as", "ModelNotFoundError"])
    frontend = core.frontend()
    assert failed.wait(20)
    frontend.say(Hello(PROTOCOL, "test", os.getpid()))
    assert frontend.hear() == Refused("no such model", "ModelNotFoundError")


def test_a_worker_that_never_starts_ends_the_core_with_its_cause(start_core: Callable) -> None:
    core = start_core(worker_options=["--nonsense"])
    frontend = core.frontend()
    frontend.say(Hello(PROTOCOL, "test", os.getpid()))
    text = "the worker did not start: exited with status 2"
    assert frontend.hear() == Refused(text, "EngineDeadError")


def test_too_few_blocks_for_one_request_is_said(start_core: Callable) -> None:
    core = start_core(worker_options=["--num-blocks", "2"])
    frontend = core.frontend()
    frontend.say(Hello(PROTOCOL, "test", os.getpid()))
    refusal = frontend.hear()
    assert "lower max_model_len to 32" in refusal.error and refusal.error_type == "ValueError"
    core.thread.join(20)
    assert "lower max_model_len to 32" in str(core.error)


def test_draining_finishes_what_runs_and_refuses_the_rest(start_core: Callable) -> None:
    core = start_core()
    frontend = core.frontend()
    frontend.attach()
    frontend.submit(1, [1], max_tokens=100)
    frontend.take(frontend.hear())
    core.core.stop(20.0)
    frontend.submit(2, [2])
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1], 100)
    while not isinstance(message := frontend.hear(), CoreDying):
        frontend.take(message)
    assert message.stopped and "shut down" in message.cause
    if (2, 0) in frontend.ends:
        assert "shutting down" in frontend.ends[2, 0].error


def test_a_message_that_cannot_be_read_is_refused_by_name(start_core: Callable) -> None:
    """The frontend learns which of its requests, or which call, will not be answered; others go on."""
    frontend = start_core().frontend()
    frontend.attach()
    frontend.submit(1, [1, 2], max_tokens=40)
    broken = [[2, "two", "no prompt"], [3, "three"], ["four"], 5, []]
    for message, keys, call_id in (
        ({"type": "submit", "requests": broken}, [2, 3], None),
        ({"type": "submit", "requests": 7}, [], None),
        ({"type": "call", "call_id": 9, "method": ["sleep"]}, [], 9),
        ({"type": "call", "call_id": 2**64 - 1, "method": 1}, [], None),
        ([1, 2], [], None),
    ):
        frontend.say(message)
        while isinstance(refused := frontend.hear(), Deltas):
            frontend.take(refused)
        assert isinstance(refused, Refused) and refused.error_type == "ProtocolError"
        assert (refused.keys, refused.call_id) == (keys, call_id)
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2], 40)


def test_an_answer_comes_after_all_output_before_it(start_core: Callable) -> None:
    """So a request that was aborted before the call may be submitted again under its key."""
    frontend = start_core().frontend()
    frontend.attach()
    for round in range(20):
        frontend.submit(1, [1, 2 + round], max_tokens=100)
        frontend.take(frontend.hear())
        frontend.say(Abort([1]))
        frontend.status()
        frontend.say(Call(2, "status"))
        assert isinstance(frontend.hear(), CallAnswer)
