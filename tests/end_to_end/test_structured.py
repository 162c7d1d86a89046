"""Structured output on the demo model: whatever is finished is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema

from pagewire import LLM, RequestOutput, SamplingParams
from pagewire.frontend.llm import BatchError

SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))
SEEDS = 3


def outputs_of(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    """The outputs of a batch, also where some were refused."""
    try:
        return llm.generate(prompts, params, use_tqdm=False)
    except BatchError as error:
        return error.outputs


def test_every_finished_output_validates(llm: LLM) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=300, structured_outputs={"json": entry["schema"]})  # type: ignore[arg-type]
        for entry in SCHEMAS
        for seed in range(SEEDS)
    ]
    outputs = outputs_of(llm, ["The answer is"] * len(params), params)
    finished: dict[str, int] = {}
    wrong = []
    for i, output in enumerate(outputs):
        entry, completion = SCHEMAS[i // SEEDS], output.outputs[0]
        reason = completion.finish_reason
        assert reason in ("stop", "length", "error")
        finished[reason] = finished.get(reason, 0) + 1
        if reason == "stop":
            try:
                jsonschema.validate(
                    json.loads(completion.text),
                    entry["schema"],
                    format_checker=jsonschema.FormatChecker(),
                )
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append((entry, completion.text, str(error)))
    print(finished)
    for w in wrong:
        print(w)
    assert not wrong
