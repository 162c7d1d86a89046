"""What structured output costs and serves: `python -m benchmarks.structured [MODEL ...]`, from the root.

For each model, tokens per second of a batch with and without a grammar, in turn, greedy and sampled: the ratio
of the medians is the price. Then the share of the schemas of `tests/end_to_end/schemas.json` that are served
by the embedded model, and whether all that is finished validates. The last line is all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from pagewire import LLM, SamplingParams
from tests.end_to_end.test_structured import SCHEMAS, faults, outputs_of, params_for_schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "kind": {"enum": ["guest", "member", "staff"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": PERSON, "minItems": 1000}  # so that every output has as many tokens


def rate(llm: LLM, batch: int, tokens: int, temperature: float, schema: dict[str, Any] | None) -> float:
    """Output tokens per second of one batch."""
    structure: Any = None if schema is None else {"json": schema}
    params = [
        SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=temperature,
            seed=seed,
            detokenize=False,
            structured_outputs=structure,
        )
        for seed in range(batch)
    ]
    prompts = [[100 + i] * 32 for i in range(batch)]
    begin = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert generated == batch * tokens, "an output ended early"
    return generated / seconds


def compare(model: str, batch: int, tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Both rates for a model, in turn."""
    found = []
    with LLM(model, max_model_len=1024, disable_log_stats=True) as llm:
        for temperature in (0.0, 1.0):
            rates: dict[str, list[float]] = {"plain": [], "grammar": []}
            for schema in (None, ENDLESS):
                rate(llm, batch, 16, temperature, schema)
            for _ in range(repeats):
                rates["plain"].append(rate(llm, batch, tokens, temperature, None))
                rates["grammar"].append(rate(llm, batch, tokens, temperature, ENDLESS))
            medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
            ratio = round(medians["grammar"] / medians["plain"], 3)
            found.append(
                {"model": model, "temperature": temperature, **medians, "ratio": ratio, "runs": rates}
            )
            print(
                f"{model}, temperature {temperature:g}: {medians['plain']:.0f} tokens/s, with a grammar "
                f"{medians['grammar']:.0f}: {ratio:.3f}",
                flush=True,
            )
    return found


def share_served(seeds: int) -> dict[str, Any]:
    """How many schemas the embedded model serves, and whether what it finished validates."""
    with LLM("demo", disable_log_stats=True) as llm:
        params = params_for_schemas(seeds)
        outputs = outputs_of(llm, ["The answer is"] * len(params), params)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    served = [i for i in range(len(SCHEMAS)) if reasons[i * seeds] != "error"]
    refused = sorted({SCHEMAS[i]["feature"] for i in range(len(SCHEMAS)) if i not in served})
    wrong = faults(outputs, seeds)
    print(f"schemas served: {len(served)} of {len(SCHEMAS)} ({len(served) / len(SCHEMAS):.1%})")
    print(f"features with a refused schema: {', '.join(refused)}")
    print(f"outputs: {reasons.count('stop')} finished, of which {len(wrong)} are not valid")
    return {
        "schemas": len(SCHEMAS),
        "served": len(served),
        "refused": refused,
        "finished": reasons.count("stop"),
        "invalid": len(wrong),
    }


def main() -> int:
    """Measure and print. Status 1: an output was not valid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3, help="outputs per schema")
    options = parser.parse_args()
    speed = []
    for model in options.models:
        speed += compare(model, options.batch, options.tokens, options.repeats)
    schemas = share_served(options.seeds)
    print(json.dumps({"speed": speed, "schemas": schemas}))
    return 1 if schemas["invalid"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
