"""Weights that change: which requests see which, what becomes of them when workers die, and what is refused."""

from __future__ import annotations

import os
import random
import signal
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pagewire.engine_core.calls.weight_updates import MAX_PARTS
from pagewire.engine_core.clients.access import Access
from pagewire.engine_core.weights.upload import header_of
from pagewire.ipc.wire.items import TensorForm
from pagewire.ipc.wire.messages import Goodbye
from tests.engine_core.conftest import RawFrontend, RunningCore
from tests.engine_core.fake_worker import WEIGHTS, next_token, weights_content

FORMS = {name: TensorForm(name, dtype, shape) for name, dtype, shape in WEIGHTS}
Tensors = dict[str, bytes]


def tensors(number: int, *names: str) -> Tensors:
    """Tensors of a version, by name."""
    return {name: struct.pack("<4i", number, len(name), 0, ord(name)) for name in names or FORMS}


def write(path: Path, content: Mapping[str, bytes], forms: Mapping[str, TensorForm] = FORMS) -> str:
    """A safetensors file; returns its path."""
    head, _ = header_of([forms[name] for name in content])
    path.write_bytes(head + b"".join(content.values()))
    return str(path)


def roll_out(prompt: list[int], count: int, content: Tensors, seed: int = 7) -> list[int]:
    """The tokens that a worker with these weights gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, weights_content(content)))
    return tokens[len(prompt) :]


@pytest.fixture
def start(start_core: Callable[..., RunningCore], tmp_path: Path) -> Callable[..., RunningCore]:
    """Start a core that reads weights below `tmp_path`."""
    return lambda **options: start_core(weights_dir=str(tmp_path), **options)


def attached(core: RunningCore, name: str = "test") -> RawFrontend:
    frontend = core.frontend(name)
    frontend.attach()
    return frontend


def assert_runs(frontend: RawFrontend, key: int, content: Tensors, version: str) -> None:
    """A request is run with these weights, and says so; its prompt is not found in the cache of others."""
    prompt = [5, *range(40)]
    frontend.submit(key, prompt)
    frontend.finish((key, 0))
    assert frontend.outputs[key, 0] == roll_out(prompt, 8, content)
    end = frontend.ends[key, 0]
    assert (end.weights, end.num_cached_tokens) == ([(0, version)] if version else [], 0)


def weights_of(frontend: RawFrontend) -> list[bytes]:
    result: list[bytes] = frontend.call("collective_rpc", "weights").result
    return result


def upload(frontend: RawFrontend, content: Tensors, step: int = 7) -> int:
    """Send tensors a few bytes at a time; returns the number of the upload."""
    forms = [[name, FORMS[name].dtype, FORMS[name].shape] for name in content]
    number: int = frontend.call("begin_weights", forms).result
    data = b"".join(content.values())
    for offset in range(0, len(data), step):
        part = data[offset : offset + step]
        assert frontend.call("send_weights", number, offset, part).result == offset + len(part)
    return number


@pytest.mark.parametrize("num_workers", [1, 2])
def test_from_a_file_and_from_a_frontend(
    start: Callable[..., RunningCore], tmp_path: Path, num_workers: int
) -> None:
    frontend = attached(start(num_workers=num_workers))
    assert_runs(frontend, 1, {}, "")
    path = write(tmp_path / "1.safetensors", tensors(1))
    assert frontend.call("update_weights", path).result == "1"
    assert_runs(frontend, 2, tensors(1), "1")
    number = upload(frontend, tensors(2))
    assert frontend.call("update_weights", "", number, "second").result == "second"
    assert_runs(frontend, 3, tensors(2), "second")
    assert frontend.call("update_weights", "1.safetensors").result == "3"
    assert_runs(frontend, 4, tensors(1), "3")
    assert weights_of(frontend) == [weights_content(tensors(1))] * num_workers
    assert frontend.status()["weights"] == "3" and frontend.status()["worker_starts"] == 1


def test_what_is_not_given_stays(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    core = start()
    frontend = attached(core)
    for number, names in enumerate((["v"], ["w"], ["v", "w"], ["w"], ["w"]), 1):
        path = write(tmp_path / f"{number}.safetensors", tensors(number, *names))
        assert frontend.call("update_weights", path).result == str(number)
        held = {1: [1], 2: [1, 2], 3: [3], 4: [3, 4], 5: [3, 5]}[number]
        content = {
            name: data
            for part in held
            for name, data in tensors(part, *(["v"], ["w"], ["v", "w"], ["w"], ["w"])[part - 1]).items()
        }
        assert_runs(frontend, number, content, str(number))
        assert len(core.workers.config.weights) == len(held), "files are kept that nobody needs"


def test_running_requests_finish_and_new_ones_wait(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    core = start()
    frontend, other = attached(core), attached(core, "other")
    path = write(tmp_path / "1.safetensors", tensors(1))
    assert frontend.call("begin_weights", [["v", "F32", [2, 2]]]).result, "the core knows what the model has"
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.submit(1, [1, 1], max_tokens=60)
    frontend.begin_call(7, "update_weights", path)
    frontend.begin_call(9, "fence")
    assert frontend.answer().call_id == 9
    other.submit(1, [1, 1], max_tokens=60)
    other.begin_call(8, "fence")
    assert other.answer().call_id == 8
    os.kill(core.workers.pids[0], signal.SIGCONT)
    answer = frontend.answer()
    assert (answer.call_id, answer.result) == (7, "1")
    assert (1, 0) in frontend.ends, "the answer comes after what had to end first"
    other.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 1], 60, {}) and frontend.ends[1, 0].weights == []
    assert other.outputs[1, 0] == roll_out([1, 1], 60, tensors(1)) and other.ends[1, 0].weights == [(0, "1")]


def spans(
    output: list[int], prompt: list[int], weights: list[tuple[int, str]], versions: Mapping[str, Tensors]
) -> None:
    """Check that each token of an output is that of the version which the output says."""
    starts = [(0, ""), *weights]
    for (first, name), (end, _) in zip(starts, [*starts[1:], (len(output), "")], strict=True):
        assert output[first:end] == roll_out(prompt + output[:first], end - first, versions[name])


def test_running_requests_go_on_with_the_new_weights(
    start: Callable[..., RunningCore], tmp_path: Path
) -> None:
    core = start(max_num_seqs=2)
    frontend = attached(core)
    path = write(tmp_path / "1.safetensors", tensors(1))
    for key in range(1, 5):
        frontend.submit(key, [key, 1, *range(20)], max_tokens=50)
    while len(frontend.outputs.get((1, 0), [])) < 5:
        frontend.take(frontend.hear())
    assert frontend.call("update_weights", path, 0, "", "recompute").result == "1"
    frontend.finish(*((key, 0) for key in range(1, 5)))
    for key in range(1, 5):
        output, weights = frontend.outputs[key, 0], frontend.ends[key, 0].weights
        assert len(output) == 50 and weights[-1][1] == "1"
        spans(output, [key, 1, *range(20)], weights, {"": {}, "1": tensors(1)})
    assert frontend.ends[1, 0].weights[0][0] >= 5 and frontend.ends[4, 0].weights == [(0, "1")]


def test_running_requests_end_with_an_error(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    core = start(max_num_seqs=2)
    frontend = attached(core)
    path = write(tmp_path / "1.safetensors", tensors(1))
    for key in range(1, 5):
        frontend.submit(key, [key, 1], max_tokens=120)
    while len(frontend.outputs.get((1, 0), [])) < 5:
        frontend.take(frontend.hear())
    assert frontend.call("update_weights", path, 0, "", "abort").result == "1"
    frontend.finish(*((key, 0) for key in range(1, 5)))
    for key in (1, 2):
        end = frontend.ends[key, 0]
        assert (end.finish_reason, end.error_type) == ("error", "WeightsChangedError")
    for key in (3, 4):
        assert frontend.outputs[key, 0] == roll_out([key, 1], 120, tensors(1)), "it waited"
    state = frontend.status()
    assert state["num_free_blocks"] == state["num_blocks"] and state["running"] == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_killed_workers_come_back_with_the_new_weights(
    start: Callable[..., RunningCore], tmp_path: Path, num_workers: int
) -> None:
    core = start(num_workers=num_workers)
    frontend = attached(core)
    path = tmp_path / "1.safetensors"
    assert frontend.call("update_weights", write(path, tensors(1, "v"))).result == "1"
    path.unlink()  # the core keeps it open
    assert frontend.call("update_weights", "", upload(frontend, tensors(2, "w"))).result == "2"
    both = tensors(1, "v") | tensors(2, "w")
    frontend.submit(1, [1, 2], max_tokens=100)
    while len(frontend.outputs.get((1, 0), [])) < 5:
        frontend.take(frontend.hear())
    os.kill(core.workers.pids[-1], signal.SIGKILL)
    frontend.finish((1, 0))
    assert frontend.outputs[1, 0] == roll_out([1, 2], 100, both) and frontend.ends[1, 0].weights == [(0, "2")]
    assert frontend.status()["worker_starts"] == 2
    assert weights_of(frontend) == [weights_content(both)] * num_workers
    assert_runs(frontend, 2, both, "2")


@pytest.mark.parametrize("requests", ["finish", "recompute", "abort"])
def test_a_worker_that_dies_in_an_update_comes_back_with_the_old_weights(
    start: Callable[..., RunningCore], tmp_path: Path, requests: str
) -> None:
    core = start()
    frontend = attached(core)
    old, new = (write(tmp_path / f"{number}.safetensors", tensors(number)) for number in (1, 2))
    assert frontend.call("update_weights", old).result == "1"
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    frontend.begin_call(7, "update_weights", new, 0, "", requests)
    for call_id in (8, 9):  # the core has called the worker in the turn between
        frontend.begin_call(call_id, "fence")
        assert frontend.answer().call_id == call_id
    os.kill(core.workers.pids[0], signal.SIGKILL)
    answer = frontend.answer()
    assert (answer.call_id, answer.error_type) == (7, "RuntimeError") and "was lost" in str(answer.error)
    assert_runs(frontend, 1, tensors(1), "1")
    assert weights_of(frontend) == [weights_content(tensors(1))]
    assert frontend.call("update_weights", new).result == "2"
    assert_runs(frontend, 2, tensors(2), "2")


def test_a_rank_that_fails_leaves_all_with_the_old_weights(
    start: Callable[..., RunningCore], tmp_path: Path
) -> None:
    frontend = attached(start(num_workers=2, worker_options=["--fail", "1", "load_weights"]))
    path = write(tmp_path / "1.safetensors", tensors(1))
    answer = frontend.call("update_weights", path)
    assert answer.error_type == "OSError" and "load_weights failed in rank 1" in str(answer.error)
    frontend.wait_for_start(2)
    assert weights_of(frontend) == [b"", b""]
    assert_runs(frontend, 1, {}, "")


def test_wrong_weights_change_nothing(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    core = start()
    frontend = attached(core)
    others = {"x": TensorForm("x", "F32", [4]), "w": TensorForm("w", "F32", [2, 2]), "v": FORMS["v"]}
    unknown = write(tmp_path / "unknown.safetensors", tensors(1, "v", "x"), others)
    shape = write(tmp_path / "shape.safetensors", tensors(1, "v", "w"), others)
    good = write(tmp_path / "good.safetensors", tensors(1))
    (tmp_path / "link.safetensors").symlink_to(good)
    for arguments, kind, text in [
        ([unknown], "ValueError", "no tensor 'x'"),
        ([shape], "ValueError", "'w' is of shape [2, 2], and the model's [4]"),
        (["link.safetensors"], "PermissionError", "is a link"),
        (["/etc/passwd"], "PermissionError", "is not below"),
        (["nowhere"], "ValueError", "cannot be opened"),
        ([], "ValueError", "either a path or the number"),
        ([good, 1], "ValueError", "either a path or the number"),
        (["", 3], "ValueError", "no upload 3"),
        ([good, 0, "", "later"], "ValueError", "requests"),
        ([good, 0, "x" * 2000], "ValueError", "version"),
    ]:
        answer = frontend.call("update_weights", *arguments)
        assert answer.error_type == kind and text in str(answer.error), answer
    for method, arguments, kind, text in [
        ("begin_weights", [[["x", "F32", [4]]]], "ValueError", "no tensor 'x'"),
        ("begin_weights", [[["w", "F32", [5]]]], "ValueError", "is of shape [5]"),
        ("begin_weights", [[["w", "I32", [4]]]], "ValueError", "is of dtype 'I32'"),
        ("begin_weights", [[]], "ValueError", "at least one tensor"),
        ("begin_weights", ["w"], "TypeError", "tensors"),
        ("send_weights", [1, 0, b"x"], "ValueError", "no upload 1"),
        ("send_weights", [1, 0, bytes(1 << 20)], "ValueError", "data"),
        ("load_weights", [[]], "PermissionError", "the core alone"),
        ("collective_rpc", ["load_weights", [[]]], "ValueError", "load_weights"),
    ]:
        answer = frontend.call(method, *arguments)
        assert answer.error is not None and text in answer.error, answer
        assert answer.error_type == kind, answer
    assert weights_of(frontend) == [b""] and frontend.status()["worker_starts"] == 1
    assert_runs(frontend, 1, {}, "")
    assert frontend.call("update_weights", good).result == "1"
    again = frontend.call("update_weights", good, 0, "1")
    assert again.error_type == "ValueError" and "is the version of the present weights" in str(again.error)


def test_one_update_and_one_upload_at_a_time(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    core = start()
    first, second = attached(core, "first"), attached(core, "second")
    path = write(tmp_path / "1.safetensors", tensors(1))
    forms = [["v", "F32", [2, 2]]]
    number = first.call("begin_weights", forms).result
    refused = second.call("begin_weights", forms)
    assert refused.error_type == "EngineBusyError" and "another frontend" in str(refused.error)
    assert "no upload" in str(second.call("send_weights", number, 0, b"x").error)
    assert first.call("begin_weights", forms).result == number + 1
    assert "no upload" in str(first.call("send_weights", number, 0, b"x").error), "it was dropped"
    assert "only 0 of 16 bytes" in str(first.call("update_weights", "", number + 1).error)
    first.say(Goodbye())
    while len(core.clients.attached) > 1:
        second.status()
    assert second.call("begin_weights", forms).result == number + 2
    second.submit(1, [1, 1], max_tokens=100)
    os.kill(core.workers.pids[0], signal.SIGSTOP)
    second.begin_call(7, "update_weights", path)
    second.begin_call(8, "fence")
    assert second.answer().call_id == 8
    third = attached(core, "third")
    refused = third.call("update_weights", path)
    assert refused.error_type == "EngineBusyError" and "another update" in str(refused.error)
    os.kill(core.workers.pids[0], signal.SIGCONT)
    assert second.answer().result == "1"


def test_sleeping_engines_are_woken_first(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    frontend = attached(start())
    path = write(tmp_path / "1.safetensors", tensors(1))
    assert frontend.call("sleep", 2).error is None
    answer = frontend.call("update_weights", path)
    assert answer.error_type == "EngineBusyError" and "wake_up comes first" in str(answer.error)
    assert frontend.call("wake_up").error is None
    assert frontend.call("update_weights", path).result == "1"
    assert_runs(frontend, 1, tensors(1), "1")


def test_workers_that_are_woken_have_the_weights_of_the_last_update(
    start: Callable[..., RunningCore], tmp_path: Path
) -> None:
    frontend = attached(start())
    assert frontend.call("update_weights", write(tmp_path / "1.safetensors", tensors(1))).result == "1"
    assert frontend.call("sleep", 2).error is None and frontend.call("wake_up").error is None
    assert frontend.status()["worker_starts"] == 2
    assert_runs(frontend, 1, tensors(1), "1")


def test_control_is_needed(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    rights = tmp_path / "rights.yaml"
    rights.write_text("default: [read, generate, events]")
    rights.chmod(0o600)
    frontend = attached(start(access=Access(rights=rights)))
    for method, arguments in (
        ("update_weights", ["1.safetensors"]),
        ("begin_weights", [[["w", "F32", [4]]]]),
        ("send_weights", [1, 0, b"x"]),
        ("load_weights", [[]]),
    ):
        answer = frontend.call(method, *arguments)
        assert answer.error_type == "PermissionError" and "'control'" in str(answer.error)


def test_paths_need_a_folder(start_core: Callable[..., RunningCore], tmp_path: Path) -> None:
    frontend = attached(start_core())
    answer = frontend.call("update_weights", write(tmp_path / "1.safetensors", tensors(1)))
    assert answer.error_type == "PermissionError" and "--weights-dir" in str(answer.error)
    assert frontend.call("update_weights", "", upload(frontend, tensors(1))).result == "1"


def test_files_that_are_kept_are_few(
    start: Callable[..., RunningCore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.engine_core.calls.weight_updates.MAX_PARTS", 1)
    assert MAX_PARTS > 1
    core = start()
    frontend = attached(core)
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    assert frontend.call("update_weights", "", upload(frontend, tensors(1, "v"))).result == "1"
    refused = frontend.call("update_weights", "", upload(frontend, tensors(2, "w")))
    assert "send all" in str(refused.error)
    for number in range(2, 5):
        assert frontend.call("update_weights", "", upload(frontend, tensors(number))).result == str(number)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before + 1


def test_random_updates_under_load(start: Callable[..., RunningCore], tmp_path: Path) -> None:
    """Every token is that of the weights which its output names, whatever updates and kills come between."""
    rng = random.Random(4)
    core = start(max_num_seqs=4, max_num_batched_tokens=32)
    frontend = attached(core)
    versions: dict[str, Tensors] = {"": {}}
    content: Tensors = {}
    prompts: dict[int, list[int]] = {}
    for number in range(60):
        for _ in range(rng.randrange(4)):
            key = len(prompts)
            prompts[key] = [rng.randrange(900), *range(rng.randrange(40))]
            frontend.submit(key, prompts[key], max_tokens=rng.randrange(1, 60))
        if rng.random() < 0.1:
            frontend.kill_worker()
        names = rng.choice((["v"], ["w"], ["v", "w"]))
        mode = rng.choice(("finish", "recompute", "abort"))
        path = write(tmp_path / f"{number}.safetensors", tensors(number, *names))
        answer = frontend.call("update_weights", path, 0, "", mode)
        if answer.error is None:
            content = content | tensors(number, *names)
            versions[answer.result] = content
        else:
            assert "was lost" in answer.error
    frontend.finish(*((key, 0) for key in prompts))
    num_ended = 0
    for key, prompt in prompts.items():
        end = frontend.ends[key, 0]
        if end.finish_reason == "error":
            assert end.error_type == "WeightsChangedError"
            num_ended += 1
        else:
            spans(frontend.outputs[key, 0], prompt, end.weights, versions)
    assert num_ended > 3 and len(versions) > 40
    assert any(len(end.weights) > 1 for end in frontend.ends.values())
