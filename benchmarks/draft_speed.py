"""What a drafter is worth: one request with drafts and without them in turn, in one process.

    python -m benchmarks.draft_speed MODEL DRAFT [--quantization int4] [--drafts 2 3 4] [--temperature 0]

DRAFT is a draft model, an EAGLE-3 head or an MLP speculator, as its config.json says. Prints for each number of
drafts how many of them count, by position, how many tokens a step yields and what it costs, and how much faster the
request is, by the clock and by the processor's time, which says more on a machine that others use. The outputs are
compared: they are the same.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from benchmarks.limits import processor
from benchmarks.target_text import NUM_PROMPT_TOKENS, texts
from pagewire.ipc.files.model_configs import read_configs
from pagewire.ipc.speculative import SpeculativeConfig, draft_method
from pagewire.ipc.wire.params import SamplingParams
from pagewire.ipc.wire.worker_messages import WorkerConfig
from pagewire.workers.process.wiring import open_runner
from pagewire.workers.run.runner import Runner
from tests.workers.speculation.speculating import Speculated, SpeculativeDriver

MAX_MODEL_LEN = 512


class Seconds(NamedTuple):
    """Of a token."""

    clock: float
    processor: float

    def __add__(self, other: object) -> Seconds:
        """The sum of both."""
        assert isinstance(other, Seconds)
        return Seconds(self.clock + other.clock, self.processor + other.processor)


class Requests:
    """Runs one request after another on a runner, each in blocks of its own."""

    def __init__(self, runner: Runner, params: SamplingParams, num_tokens: int) -> None:
        self._runner, self._params, self._num_tokens = runner, params, num_tokens

    def run(self, prompt: list[int], seed: int, num_drafts: int) -> tuple[Speculated, Seconds]:
        """The request, and the seconds of a token behind its prompt."""
        driver = SpeculativeDriver(self._runner, budget=2048, wanted=lambda step, slot: num_drafts)
        request = driver.add(0, prompt, self._params, seed)
        driver.run([request], 2)  # the prompt, and the drafter's first step over it
        known, clock, processor = len(request.output), time.perf_counter(), time.process_time()
        driver.run([request], self._num_tokens)
        count = len(request.output) - known
        return request, Seconds(
            (time.perf_counter() - clock) / count, (time.process_time() - processor) / count
        )


def main() -> None:
    """Measure, and print a line for each number of drafts."""
    parser = argparse.ArgumentParser(description="Measure what a drafter is worth.")
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--quantization", help="of the drafter, while it is loaded")
    parser.add_argument("--model-quantization", help="of the model, while it is loaded")
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    method = draft_method(read_configs(Path(options.draft))[0])
    speculative = SpeculativeConfig(
        method, options.draft, max(options.drafts), quantization=options.quantization
    )
    config = WorkerConfig(
        options.model,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        num_blocks=128,
        num_threads=options.threads,
        quantization=options.model_quantization,
        speculative=speculative,
    )
    runner, _ = open_runner(config, lambda *_: None)
    tokenizer = Tokenizer.from_file(str(Path(options.draft) / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids[:NUM_PROMPT_TOKENS] for text in texts(held_out=True)]
    prompts = [ids for ids in prompts if len(ids) == NUM_PROMPT_TOKENS][: options.prompts]
    params = SamplingParams(temperature=options.temperature, ignore_eos=True)
    requests = Requests(runner, params, options.tokens)
    print(f"{processor()}; {runner.device.num_threads} threads; load {os.getloadavg()[0]:.1f}")
    print(
        f"weights: model {runner.model.weight_bytes >> 20} MiB, drafter {runner.drafter.weight_bytes >> 20} MiB"
    )
    for num_drafts in options.drafts:
        measure(requests, prompts, num_drafts, options.tokens)


def measure(requests: Requests, prompts: list[list[int]], num_drafts: int, num_tokens: int) -> None:
    """Run each prompt without drafts and with them, and print what that gives."""
    plain = with_drafts = Seconds(0.0, 0.0)
    drafted: list[Speculated] = []
    for seed, prompt in enumerate(prompts):
        alone, seconds = requests.run(prompt, seed, 0)
        request, other = requests.run(prompt, seed, num_drafts)
        if alone.output[:num_tokens] != request.output[:num_tokens]:
            raise SystemExit("drafts have changed an output")
        plain, with_drafts = plain + seconds, with_drafts + other
        drafted.append(request)
    num_steps = sum(len(request.proposals) for request in drafted)
    yielded = 1 + sum(request.num_accepted for request in drafted) / num_steps
    shares = ", ".join(f"{share:.0%}" for share in counts(drafted, num_drafts))
    print(
        f"{num_drafts} drafts: {shares} count, {yielded:.2f} tokens a step, which takes "
        f"{yielded * with_drafts.processor / plain.processor:.2f} x the processor's time of one without; "
        f"{1000 * plain.clock / len(prompts):.2f} -> {1000 * with_drafts.clock / len(prompts):.2f} ms a token: "
        f"{plain.clock / with_drafts.clock:.2f} x; {plain.processor / with_drafts.processor:.2f} x "
        "by the processor's time",
        flush=True,
    )


def counts(requests: list[Speculated], num_drafts: int) -> list[float]:
    """The share of drafts that are right at each position, if all before it are."""
    right, tried = [0] * num_drafts, [0] * num_drafts
    for request in requests:
        for proposal in request.proposals:
            found = request.tokens[len(proposal.before) :]
            for place, (draft, token) in enumerate(zip(proposal.drafts, found, strict=False)):
                tried[place] += 1
                if draft != token:
                    break
                right[place] += 1
    return [share / max(1, count) for share, count in zip(right, tried, strict=True)]


if __name__ == "__main__":
    main()
