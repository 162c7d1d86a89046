"""A policy gradient (REINFORCE): a model learns to write short words, and the engine gets the weights of each step.

python examples/policy_gradient.py --model demo --steps 12
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM

from pagewire import LLM, SamplingParams

PROMPTS = ["A list is", 'The "with" statement', "The function returns", "An iterator is"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
parser.add_argument("--steps", type=int, default=12)
arguments = parser.parse_args()


def reward(text: str) -> float:
    """The share of words of at most three letters."""
    words = text.split()
    return sum(len(word) <= 3 for word in words) / max(1, len(words))


torch.manual_seed(0)
with LLM(model=arguments.model, dtype="float32") as llm:
    policy = AutoModelForCausalLM.from_pretrained(llm.info.model_path, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for step in range(arguments.steps):
        params = SamplingParams(n=16, max_tokens=24, seed=step, logprobs=0, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        rewards = torch.tensor([[reward(part.text) for part in output.outputs] for output in outputs])
        advantages = rewards - rewards.mean(1, keepdim=True)
        mismatch = 0.0
        for output, own in zip(outputs, advantages, strict=True):
            prompt, chosen = (
                output.prompt_token_ids,
                torch.tensor([part.token_ids for part in output.outputs]),
            )
            tokens = torch.cat([torch.tensor([prompt] * len(chosen)), chosen], 1)
            logits = policy(tokens).logits[:, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1).gather(2, chosen[:, :, None])[:, :, 0]
            (-(own[:, None] * logprobs).mean() / len(PROMPTS)).backward()
            for part, trained in zip(output.outputs, logprobs.detach(), strict=True):
                steps = zip(part.logprobs, part.token_ids, strict=True)
                sampled = torch.tensor([each[token].logprob for each, token in steps])
                mismatch = max(mismatch, float((trained - sampled).abs().max()))
        optimizer.step()
        optimizer.zero_grad()
        version = llm.update_weights(dict(policy.named_parameters()))
        print(f"step {version}: reward {rewards.mean():.3f}, log probabilities differ by {mismatch:.1e}")
