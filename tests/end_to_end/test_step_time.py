"""Steps that end in time, with real processes: more steps, and the same tokens and log probabilities."""

from __future__ import annotations

from typing import Any

from pagewire import EngineArgs, LLMEngine, SamplingParams
from pagewire.frontend.requests.outputs import RequestOutput

TEXT = (
    "The with statement is used to wrap the execution of a block with methods defined by a context manager. "
)
STREAM = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, logprobs=1)
PROMPTS = [TEXT, 6 * TEXT, "The answer is", 3 * TEXT]
PARAMS = [
    SamplingParams(temperature=1.0, seed=5, max_tokens=41, repetition_penalty=1.2),
    SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1, logprobs=1),
    SamplingParams(temperature=0.8, seed=7, top_p=0.9, max_tokens=50, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=9, max_tokens=12, logprobs=3),
]


def test_a_limit_of_time_changes_no_token_and_no_log_probability() -> None:
    without, largest = beside_a_stream(0)
    limited, smallest = beside_a_stream(1)  # within a millisecond a step computes about a block
    assert limited == without
    assert largest > smallest, "the limit has divided nothing"


def beside_a_stream(limit: int) -> tuple[dict[str, list[Any]], float]:
    """The results of prompts that come while a sequence generates, and the most tokens of a step, as a bound."""
    engine = LLMEngine.from_engine_args(EngineArgs("demo", max_step_ms=limit))
    try:
        found: dict[str, list[Any]] = {}
        engine.add_request("stream", "In Python", STREAM)
        while not any(output.outputs[0].token_ids for output in engine.step()):
            pass
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.add_request(f"{number}", prompt, params)
        while engine.has_unfinished_requests():
            found |= {output.request_id: results(output) for output in engine.step() if output.finished}
        rows = engine.session.call("metrics").result(30)
    finally:
        engine.shutdown()
    assert len(found) == 1 + len(PROMPTS)
    (row,) = (row for row in rows if row["name"] == "vllm:iteration_tokens_total")
    return found, min(float(bound) for bound, number in row["buckets"].items() if number == row["count"])


def results(output: RequestOutput) -> list[Any]:
    """Tokens and log probabilities."""
    (sequence,) = output.outputs
    return [sequence.token_ids, sequence.logprobs, output.prompt_logprobs]
