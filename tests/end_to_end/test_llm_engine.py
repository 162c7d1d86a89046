"""`LLMEngine` step by step, and what of `LLM` needs a real engine and is not generation."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from transformers import AutoTokenizer

import pagewire.demo
from pagewire import (
    LLM,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StatLoggerBase,
)
from pagewire.frontend.core.stat_loggers import Stats
from pagewire.ipc.errors import EngineAsleepError

PROMPT = 'The "with" statement is used to'
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)

INTERRUPTED = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever was inherited
from pagewire import LLM, SamplingParams
with LLM("demo") as llm:
    print(llm.llm_engine.session._spawned.child.pid, flush=True)
    llm.generate(["The"] * 200, SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
"""


@pytest.fixture
def engine(address: str) -> Iterator[LLMEngine]:
    attached = LLMEngine.attach(address)
    yield attached
    attached.shutdown()


def run_all(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_steps_give_what_generate_gives(engine: LLMEngine, llm: LLM) -> None:
    expected = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0]
    assert engine.step() == [] and not engine.has_unfinished_requests()
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0.0, max_tokens=20, output_kind=kind)
        engine.add_request(kind.name, PROMPT, params)
    assert engine.get_num_unfinished_requests() == 3
    outputs = run_all(engine)
    assert engine.get_num_unfinished_requests() == 0
    assert "".join(output.outputs[0].text for output in outputs["DELTA"]) == expected.text
    assert outputs["CUMULATIVE"][-1].outputs[0].text == expected.text
    assert [output.outputs[0].text for output in outputs["FINAL_ONLY"]] == [expected.text]


def test_ids_in_use_and_aborts(engine: LLMEngine) -> None:
    engine.add_request("long", PROMPT, ENDLESS)
    with pytest.raises(ValueError, match="'long' is in use"):
        engine.add_request("long", PROMPT, GREEDY)
    with pytest.raises(ValueError, match="empty"):
        engine.add_request("bad", "", GREEDY)
    engine.add_request("short", PROMPT, GREEDY)
    begun = {output.request_id for output in engine.step()}  # all of it, where many steps came meanwhile
    assert begun
    engine.abort_request(["long", "unknown"])
    assert set(run_all(engine)) | begun - {"long"} == {"short"}
    engine.add_request("long", PROMPT, GREEDY)  # the id is free again
    assert run_all(engine)["long"][-1].finished


def test_latencies_count_from_the_time_of_arrival(engine: LLMEngine) -> None:
    engine.add_request("late", PROMPT, GREEDY, arrival_time=time.monotonic() - 1000)
    metrics = run_all(engine)["late"][-1].metrics
    assert metrics is not None and metrics.finished_time is not None and metrics.time_in_queue is not None
    assert 1000 <= metrics.time_in_queue < 1100
    assert metrics.finished_time - metrics.arrival_time >= metrics.time_in_queue
    for wrong, error in ((time.monotonic() + 1000, ValueError), (-1.0, ValueError), ("now", TypeError)):
        with pytest.raises(error, match="arrival_time must be"):
            engine.add_request("early", PROMPT, GREEDY, arrival_time=wrong)  # type: ignore[arg-type]


def test_own_loggers_get_the_statistics_of_the_engine() -> None:
    class Counting(StatLoggerBase):
        """Counts tokens until it has got all that are expected."""

        num_tokens, done = 0, threading.Event()

        def log(self, stats: Stats) -> None:
            self.num_tokens += stats.num_generation_tokens_iter
            if self.num_tokens >= 20:
                self.done.set()

    counting = Counting(0.1)
    args = EngineArgs("demo", dtype="float32", kv_cache_memory_bytes=16 << 20)
    engine = LLMEngine.from_engine_args(args, stat_loggers={"own": counting})
    try:
        engine.add_request("one", PROMPT, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        run_all(engine)
        assert counting.done.wait(60) and counting.num_tokens == 20
    finally:
        engine.shutdown()


def test_every_form_of_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    ids = tokenizer.encode(PROMPT)
    forms = [PROMPT, ids, {"prompt": PROMPT}, {"prompt_token_ids": ids}]
    each = [llm.generate(form, GREEDY, use_tqdm=False)[0].outputs[0].text for form in forms]
    together = llm.generate(forms, [GREEDY] * 4, use_tqdm=False, priority=[0] * 4)  # type: ignore[arg-type]
    assert each == [output.outputs[0].text for output in together] and len(set(each)) == 1
    assert (
        llm.generate(prompt_token_ids=[ids], sampling_params=GREEDY, use_tqdm=False)[0].outputs[0].text
        == each[0]
    )


def test_chat_goes_on_with_a_message(llm: LLM) -> None:
    question = {"role": "user", "content": "What is the with statement?"}
    whole = llm.chat([question], GREEDY, use_tqdm=False)[0].outputs[0].text
    begun = [question, {"role": "assistant", "content": whole[:10]}]
    prompt = llm.preprocess_chat(begun, add_generation_prompt=False, continue_final_message=True)[0]
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    assert tokenizer.decode(prompt["prompt_token_ids"]).endswith(whole[:10])


def test_another_tokenizer(address: str) -> None:
    with LLM.attach(address) as attached:
        ours = attached.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text
        attached.set_tokenizer(AutoTokenizer.from_pretrained(Path(pagewire.demo.__path__[0])))
        assert attached.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].text == ours
        with pytest.raises(TypeError, match="tokenizer"):
            attached.set_tokenizer(object())


def test_profiles_and_calls(llm: LLM, tmp_path: Path) -> None:
    llm.start_profile()
    llm.generate(PROMPT, GREEDY, use_tqdm=False)
    (path,) = llm.collective_rpc("stop_profile")
    assert '"traceEvents"' in Path(path).read_text()
    Path(path).unlink()
    (info,) = llm.collective_rpc("model_info")
    assert info["architecture"] == "LlamaForCausalLM"
    with pytest.raises(ValueError, match="no method 'eval'"):
        llm.collective_rpc("eval", args=("1",))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=7, max_tokens=16)])
def test_sleeping_gives_memory_back_and_takes_it_again(llm: LLM, params: SamplingParams) -> None:
    """Tokens after each kind of sleep are those before, the drawn ones too."""

    def tokens() -> list[int]:
        return list(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids)

    before, process = tokens(), llm.collective_rpc("memory")[0]
    llm.sleep(level=1)
    asleep = llm.collective_rpc("memory")[0]
    assert asleep["weights"] == asleep["kv_cache"] == 0 < process["weights"]
    llm.wake_up()
    assert tokens() == before
    llm.sleep(level=1, tags=["kv_cache"])
    assert llm.collective_rpc("memory")[0]["weights"] == process["weights"]
    llm.wake_up()
    assert tokens() == before
    llm.sleep(level=2)
    with pytest.raises(EngineAsleepError, match="memory: the engine sleeps at level 2"):
        llm.collective_rpc("memory")
    llm.wake_up(["kv_cache"])
    llm.wake_up(["weights"])
    assert not llm.is_sleeping() and tokens() == before


def test_the_bar_and_a_bar_of_ones_own(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    from tqdm import tqdm

    totals = []

    def bar(*args: object, **kwargs: object) -> tqdm:
        totals.append(kwargs["total"])
        return tqdm(*args, **kwargs)  # type: ignore[call-overload]

    llm.generate([PROMPT] * 3, GREEDY, use_tqdm=bar)
    llm.generate([PROMPT] * 3, GREEDY)
    assert totals == [3] and "output:" in capsys.readouterr().err


def interrupt(program: subprocess.Popen[str]) -> str:
    """Press Ctrl-C, again while the program goes on, as people do, and return what it and its engine wrote.

    Python loses an interrupt that it raises in the callback of a weak reference, which is where one ends
    that comes during a garbage collection: it writes "Exception ignored" and goes on.
    """
    for _ in range(3):
        program.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            return program.communicate(timeout=10)[1]
    program.kill()
    return program.communicate()[1]


def test_ctrl_c_leaves_no_process_behind(address: str) -> None:
    with LLM.attach(address) as watcher:  # an engine is up: imports are in the page cache
        assert watcher.info.model == "demo"
    program = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    core = psutil.Process(int(program.stdout.readline()))
    family = [core, *core.children(recursive=True)]
    assert len(family) >= 2  # core and worker, and what compiles grammars once it has started
    errors = interrupt(program)
    assert program.returncode in (-signal.SIGINT, 130, 1) and "\nKeyboardInterrupt\n" in errors, errors
    gone, alive = psutil.wait_procs(family, timeout=60)
    assert len(gone) >= 2 and not alive


def test_shutdown_ends_the_processes() -> None:
    engine = LLM("demo", dtype="float32", kv_cache_memory_bytes=32 << 20)
    core = psutil.Process(engine.llm_engine.session._spawned.child.pid)  # type: ignore[union-attr]
    family = [core, *core.children(recursive=True)]
    engine.shutdown()
    engine.shutdown()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert len(family) >= 2 and not alive
