"""Patches that a model may write under a grammar: all that end must be patches.

    python -m benchmarks.patches [MODEL] [--samples 500] [--temperature 1.5]

A custom tool `apply_patch` has the grammar of the patches that Codex's agents apply. The model, which need not know
what a patch is, has to call it, at a temperature that makes it babble. Each whole call is read by the parser below,
which knows nothing of the grammar; the exit status is 1 if one is no patch.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from typing import Any

import aiohttp

from benchmarks.agents import own_server

GRAMMAR = r"""
start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?
hunk: added | deleted | updated
added: "*** Add File: " NAME LF ("+" REST LF)+
deleted: "*** Delete File: " NAME LF
updated: "*** Update File: " NAME LF ("*** Move to: " NAME LF)? change?
change: (context | line)+ ("*** End of File" LF)?
context: "@@" (" " NAME)? LF
line: /[-+ ]/ REST LF
NAME: /[^\n]+/
REST: /[^\n]*/
LF: "\n"
"""
TOOL: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": GRAMMAR}},
    },
}
ENDS = "\\n*** End Patch"  # as it stands in JSON; more likely tokens, or a babbling model ends no patch
AT_ONCE = 16


class NoPatchError(ValueError):
    """A text is no patch."""


def read_patch(text: str) -> list[tuple[str, str]]:
    """The hunks of a patch: what is done, and to which file.

    Raises:
        NoPatchError: it is none.
    """
    lines = text.removesuffix("\n").split("\n")
    if len(lines) < 3 or lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch":
        raise NoPatchError("it has no beginning or no end")
    hunks: list[tuple[str, str]] = []
    rest = lines[1:-1]
    while rest:
        kind, _, name = rest.pop(0).partition(" File: ")
        if kind not in ("*** Add", "*** Delete", "*** Update") or not name:
            raise NoPatchError(f"no hunk begins with {kind!r}")
        size = next(
            (n for n, line in enumerate(rest) if line.startswith("*** ") and " File: " in line), len(rest)
        )
        check_hunk(kind, rest[:size])
        hunks.append((kind, name))
        rest = rest[size:]
    return hunks


def check_hunk(kind: str, lines: list[str]) -> None:
    """Check the lines of a hunk behind its first.

    Raises:
        NoPatchError: one does not belong there.
    """
    if kind == "*** Update":
        if lines and lines[0].startswith("*** Move to: "):
            lines = lines[1:]
        if len(lines) > 1 and lines[-1] == "*** End of File":
            lines = lines[:-1]
        good = all(line[:1] in ("+", "-", " ") or line == "@@" or line.startswith("@@ ") for line in lines)
    elif kind == "*** Add":
        good = bool(lines) and all(line.startswith("+") for line in lines)
    else:
        good = not lines
    if not good:
        raise NoPatchError(f"lines that do not belong into a hunk {kind!r}: {lines}")


async def sample(
    session: aiohttp.ClientSession, url: str, given: argparse.Namespace, seed: int
) -> tuple[str, str]:
    """One call's text, and how it ended."""
    body = {
        "messages": [{"role": "user", "content": f"Change file number {seed}."}],
        "tools": [TOOL],
        "tool_choice": {"type": "custom", "custom": {"name": "apply_patch"}},
        "temperature": given.temperature,
        "seed": seed,
        "max_tokens": given.max_tokens,
        "logit_bias": given.bias,
    }
    async with session.post(f"{url}/chat/completions", json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise RuntimeError(answer)
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls") or [{"custom": {"input": ""}}]
    return calls[0]["custom"]["input"], choice["finish_reason"]


async def sample_all(url: str, given: argparse.Namespace) -> Counter[str]:
    """What all samples are."""
    found: Counter[str] = Counter()
    places = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        async with session.post(f"{url.removesuffix('/v1')}/tokenize", json={"prompt": ENDS}) as response:
            given.bias = dict.fromkeys(map(str, (await response.json())["tokens"]), given.favour)

        async def one(seed: int) -> None:
            async with places:
                text, reason = await sample(session, url, given, seed)
            if reason == "length":
                found["cut at max_tokens"] += 1
                return
            try:
                found["hunks"] += len(read_patch(text))
                found["patches"] += 1
            except NoPatchError as error:
                found["no patches"] += 1
                print(f"{error}: {text!r}", file=sys.stderr)

        await asyncio.gather(*(one(seed) for seed in range(given.samples)))
    return found


def main() -> int:
    """Sample, and say how many are patches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument(
        "--favour", type=float, default=6.0, help="added to the logits of the tokens that end a patch"
    )
    given = parser.parse_args()
    with own_server(given.model, []) as url:
        found = asyncio.run(sample_all(url, given))
    print(f"{given.samples} samples at temperature {given.temperature}: {dict(found)}")
    return 1 if found["no patches"] else 0


if __name__ == "__main__":
    sys.exit(main())
