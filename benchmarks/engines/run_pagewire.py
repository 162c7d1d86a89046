"""pagewire's `LLM`. See driver.py."""

from __future__ import annotations

import json
import sys
from typing import Any

from driver import Generate, serve


def start(model: str) -> tuple[Generate, Any]:
    """As a program would use it; a second argument has more of its options, as JSON."""
    from pagewire import LLM, SamplingParams

    options = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    llm = LLM(model, **{"max_model_len": 4096, **options})
    seen = {"worker_busy_s": 0.0, "worker_idle_s": 0.0}

    def generate(prompts: list[list[int]], num_out: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)

    def figures() -> dict[str, float]:
        """Seconds the worker computed, and waited while requests were running, since this was last asked."""
        status = llm.llm_engine.session.call("status").result()
        new = {name: status[name] - before for name, before in seen.items()}
        seen.update({name: status[name] for name in seen})
        return new

    return generate, figures


if __name__ == "__main__":
    serve(start)
