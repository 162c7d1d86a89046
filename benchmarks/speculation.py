"""Speculative decoding on and off, in turn, in one process: seconds, and the factor between them.

    python -m benchmarks.speculation MODEL [--method ngram suffix] [--requests 1 4 16 64] [--runs 3]
    python -m benchmarks.speculation MODEL --method --drafter DRAFTER [--drafter-quantization int8]

Two kinds of prompts: "repeats" has its own code edited or its own text corrected, most of which is copied;
"free" has nothing to repeat. Both engines live at once, and their runs alternate, so what else the machine does
slows both down; where that is much, the factor between processor seconds of core and worker tells more. The
outputs must be equal to the token. Prompts are run several times, so "suffix" has seen their outputs before, as
it has with requests that come again; "ngram" has not.

For each engine: microseconds for which the worker waits for a step, on average. With drafts a step cannot be
planned before the one before it is over, since its plan depends on how many drafts have counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from pagewire.frontend.api.llm import LLM
from pagewire.frontend.requests.outputs import RequestOutput
from pagewire.ipc.wire.params import SamplingParams

CODE = '''class Account:
    """A bank account."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("the amount must be positive")
        self.balance += amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance

    def transfer(self, other, amount):
        self.withdraw(amount)
        other.deposit(amount)

    def statement(self):
        return f"{self.owner} has {self.balance} on the account"

    def close(self):
        if self.balance != 0:
            raise ValueError("the account is not empty")
        self.owner = None
'''
TEXT = """The lighthouse number {n} stands on a cliff in the north of the island. It was built of granite by the
people of the village, who carried every stone up the path. Its lamp was lit with oil at first, and a keeper
climbed the stairs every evening to fill it. In winter the waves reached the windows of the lower floor. Today
the lamp is electric, and the tower stands empty, but the village still meets there every summer, on the
day when it was lit for the first time. The oldest man of the village tells the story of the ship that ran
aground one night in November, when the keeper was ill and the lamp stayed dark. Forty sailors swam to the
beach, and all of them were taken in by the families of the village. Three of them never left. Their names are
cut into the stone above the door, and their grandchildren keep the tower painted white."""
FREE = (
    "Tell me a story about a {n} year old sailor who has never seen the sea.",
    "Give me {n} ideas for a garden behind a small house.",
    "Why do people who are {n} years old read fewer books than before?",
    "Describe the market of a town with {n} thousand people, early in the morning.",
)


def prompts(kind: str, count: int) -> list[str]:
    """`count` different prompts. kind: "free" (text that repeats nothing), or text that repeats the prompt."""
    if kind == "free":
        asked = (FREE[i % len(FREE)].format(n=i + 7) for i in range(count))
        return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in asked]
    texts = [TEXT.replace("{n}", str(i)) for i in range(count)]
    codes = [CODE.replace("Account", f"Account{i}") for i in range(count)]
    return [
        f"{CODE}\n\n# The same class by another name:\n\n{code[: code.index('def deposit')]}"
        if i % 2 == 0
        else f"{text}\n\nThe same text again, without mistakes:\n\n{text[:150]}"
        for i, (text, code) in enumerate(zip(texts, codes, strict=True))
    ]


class Engine:
    """An engine and its processes."""

    def __init__(self, **options: Any) -> None:
        before = set(psutil.Process().children(recursive=True))
        self.llm = LLM(**options, max_model_len=1024, disable_log_stats=True)
        self._processes = set(psutil.Process().children(recursive=True)) - before

    def run(self, texts: list[str], num_tokens: int) -> tuple[float, float, list[RequestOutput]]:
        """Generate greedily; the seconds and the processor seconds that it took, and the outputs."""
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        begin, used = time.perf_counter(), self._used()
        outputs = self.llm.generate(texts, params, use_tqdm=False)
        return time.perf_counter() - begin, self._used() - used, outputs

    def waited(self) -> tuple[int, float]:
        """Steps so far, and seconds for which the worker has waited for them while there was something to do."""
        status = self.llm.session.call("status").result()
        return status["num_steps"], status["worker_idle_s"]

    def _used(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(time.user + time.system for time in times)


def compare(off: Engine, on: Engine, kind: str, count: int, options: argparse.Namespace) -> dict[str, object]:
    """The median seconds of both, the medians of the factors of neighbouring runs, and what was accepted."""
    texts, factors, used = prompts(kind, count), list[float](), list[float]()
    seconds: list[tuple[float, float]] = []
    for engine in (off, on):
        engine.run(texts, options.num_tokens)  # costs and prefixes are known from then on
    begins = [engine.waited() for engine in (off, on)]
    for number in range(options.runs):
        order = (off, on) if number % 2 == 0 else (on, off)
        found = {engine: engine.run(texts, options.num_tokens) for engine in order}
        before, after = ([list(o.outputs[0].token_ids) for o in found[engine][2]] for engine in (off, on))
        assert before == after, "an output depends on speculation"
        seconds.append((found[off][0], found[on][0]))
        factors.append(seconds[-1][0] / seconds[-1][1])
        used.append(found[off][1] / found[on][1])
    metrics = [output.metrics for output in found[on][2] if output.metrics is not None]
    waits = [
        1e6 * (engine.waited()[1] - begin[1]) / (engine.waited()[0] - begin[0])
        for engine, begin in zip((off, on), begins, strict=True)
    ]
    return {
        "kind": kind,
        "requests": count,
        "off_s": round(statistics.median(a for a, _ in seconds), 3),
        "on_s": round(statistics.median(b for _, b in seconds), 3),
        "factor": round(statistics.median(factors), 3),
        "factors": [round(factor, 2) for factor in factors],
        "processor_factor": round(statistics.median(used), 3),
        "processor_factors": [round(factor, 2) for factor in used],
        "waits_us": [round(wait) for wait in waits],
        "drafted": sum(m.num_draft_tokens for m in metrics),
        "accepted": sum(m.num_accepted_tokens for m in metrics),
        "tokens": count * options.num_tokens,
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure, and print one line for each method, kind of prompts and number of requests."""
    parser = argparse.ArgumentParser(description="Compare generation with and without speculation.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--method", nargs="*", default=["ngram", "suffix"])
    parser.add_argument("--drafter", help="a model that proposes tokens, as one more method")
    parser.add_argument("--drafter-quantization", help="of it, while it is loaded")
    parser.add_argument("--kind", nargs="+", default=["repeats", "free"])
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--num-tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, help="of each worker; with 1, processor seconds mean most")
    options = parser.parse_args()
    common = {"model": str(options.model), "num_threads": options.threads}
    off = Engine(**common)
    ways: list[dict[str, Any]] = [{"method": method} for method in options.method]
    if options.drafter is not None:
        ways.append({"model": options.drafter, "quantization": options.drafter_quantization})
    for way in ways:
        on = Engine(**common, speculative_config=way)
        for kind in options.kind:
            for count in options.requests:
                figures = compare(off, on, kind, count, options)
                print(json.dumps({**way, **figures}), flush=True)
        on.llm.shutdown()
    off.llm.shutdown()


if __name__ == "__main__":
    main()
