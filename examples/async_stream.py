"""Streams in asyncio: several requests at a time, each token as it comes, and one request that is ended early.

python examples/async_stream.py --model demo
"""

from __future__ import annotations

import argparse
import asyncio

from pagewire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams


async def stream(llm: AsyncLLM, name: str, prompt: str) -> None:
    """Print a text as it grows."""
    params = SamplingParams(temperature=0.0, max_tokens=30, output_kind=RequestOutputKind.DELTA)
    async for output in llm.generate(prompt, params, name):
        print(f"{name}: {output.outputs[0].text!r}", flush=True)


async def main(model: str) -> None:
    """Run two streams, and end a third one early."""
    llm = AsyncLLM.from_engine_args(EngineArgs(model=model))
    try:
        long = asyncio.create_task(stream(llm, "long", "A story:"))
        await asyncio.gather(stream(llm, "one", "A list is"), stream(llm, "two", 'The "for" statement'))
        long.cancel()  # its request ends in the engine, too
    finally:
        llm.shutdown()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="demo")
asyncio.run(main(parser.parse_args().model))
