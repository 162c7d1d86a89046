"""Time to the first token of requests whose JSON schema was never seen: `python -m benchmarks.unseen_schemas`.

Starts a core of its own and submits requests one after the other: some without a schema, then as many with a schema
of their own each. The last line is all of it as JSON, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from pagewire import AsyncLLM, EngineArgs, SamplingParams
from pagewire.ipc.wire.params import StructuredOutputsParams


def schema(number: int) -> dict[str, Any]:
    """A schema of a few properties with names that no other schema has."""
    properties = {
        f"name_{number}": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "kind": {"enum": ["guest", "member", f"staff_{number}"]},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


async def first_token_ms(llm: AsyncLLM, number: int, structure: StructuredOutputsParams | None) -> float:
    """Milliseconds from the submission of a request to its first token."""
    params = SamplingParams(max_tokens=1, temperature=0.0, structured_outputs=structure)
    begin = time.perf_counter()
    async for output in llm.generate(
        {"prompt_token_ids": [100 + number % 1000, 7, 8, 9]}, params, str(number)
    ):
        if output.outputs and output.outputs[0].token_ids:
            return (time.perf_counter() - begin) * 1000
    raise RuntimeError("a request ended without a token")


async def measure(model: str, count: int, pause: float) -> dict[str, Any]:
    """The times of the first schema, of all others, and of requests without one."""
    llm = AsyncLLM.from_engine_args(EngineArgs(model=model, max_model_len=1024, disable_log_stats=True))
    times: dict[str, list[float]] = {"plain": [], "schema": []}
    try:
        for number in range(20):
            await first_token_ms(llm, number, None)
        for kind, found in times.items():
            for number in range(count + 1):
                structure = StructuredOutputsParams(json=schema(number)) if kind == "schema" else None
                found.append(await first_token_ms(llm, number, structure))
                await asyncio.sleep(pause)
    finally:
        llm.shutdown()
    return {
        "first_schema": round(times["schema"][0], 1),
        **{kind: percentiles(found[1:]) for kind, found in times.items()},
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum."""
    cuts = statistics.quantiles(values, n=100)
    found = {"median": cuts[49], "p99": cuts[98], "max": max(values)}
    return {name: round(value, 1) for name, value in found.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--count", type=int, default=200, help="schemas")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two requests")
    options = parser.parse_args()
    result = asyncio.run(measure(options.model, options.count, options.pause))
    for name, value in result.items():
        print(f"{name}: {value}")
    print(json.dumps({"model": options.model, "pause_s": options.pause, **result}))


if __name__ == "__main__":
    main()
