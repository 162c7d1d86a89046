"""transformers' `generate`, one batch at a time. See driver.py."""

from __future__ import annotations

from typing import Any

from driver import Generate, serve


def start(model: str) -> tuple[Generate, Any]:
    """In bfloat16, with its default attention."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_out: int) -> None:
        ids = torch.tensor(prompts)
        module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_out,
            min_new_tokens=num_out,
            do_sample=False,
            pad_token_id=0,
        )

    return generate, dict


if __name__ == "__main__":
    serve(start)
