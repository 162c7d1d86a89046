"""pagewire's `LLM`. See driver.py."""

from __future__ import annotations

from typing import Any

from driver import Generate, serve


def start(model: str) -> tuple[Generate, Any]:
    """As a program would use it."""
    from pagewire import LLM, SamplingParams

    llm = LLM(model, max_model_len=4096)
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
