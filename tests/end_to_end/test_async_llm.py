"""`AsyncLLM` on a real core: streams, aborts, pauses, and several frontends at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pagewire import AsyncLLM, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams
from pagewire.frontend.api.async_llm import run
from pagewire.ipc.errors import EngineDeadError

PROMPT = 'The "with" statement is used to'
ENDLESS = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


def streamed(kind: RequestOutputKind, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "output_kind": kind} | options)


async def outputs_of(llm: AsyncLLM, params: SamplingParams, prompt: Any = PROMPT) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params)]


async def status(llm: AsyncLLM) -> dict[str, Any]:
    result: dict[str, Any] = await asyncio.wrap_future(llm.session.call("status"))
    return result


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what another process does; the test's own time limit ends it."""
    while not await condition():
        await asyncio.sleep(0.002)


async def there_are(llm: AsyncLLM, what: str) -> bool:
    """Requests that are "running" or "waiting"."""
    return bool((await status(llm))[what])


async def all_blocks_back(llm: AsyncLLM) -> bool:
    state = await status(llm)
    return bool(state["num_free_blocks"] == state["num_blocks"] and not state["running"])


@pytest.mark.parametrize("loop", [run, asyncio.run])
def test_kinds_of_output_say_the_same_in_the_end(address: str, loop: Callable[..., Any]) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as llm:
            kinds = (RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)
            growing, deltas, final = await asyncio.gather(
                *(outputs_of(llm, streamed(kind)) for kind in kinds)
            )
        assert len(final) == 1 and final[0].finished and len(deltas) > 1
        completion = final[0].outputs[0]
        assert growing[-1].outputs[0].text == completion.text
        assert growing[-1].outputs[0].token_ids == completion.token_ids
        assert "".join(output.outputs[0].text for output in deltas) == completion.text
        tokens = [token_id for output in deltas for token_id in output.outputs[0].token_ids]
        assert tokens == list(completion.token_ids)
        for earlier, later in itertools.pairwise(growing):
            assert later.outputs[0].text.startswith(earlier.outputs[0].text)
            assert not earlier.finished
        assert deltas[-1].outputs[0].finish_reason == completion.finish_reason

    loop(main())


def test_a_slow_consumer_gets_merged_deltas(address: str) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as llm:
            expected = (await outputs_of(llm, streamed(RequestOutputKind.FINAL_ONLY, max_tokens=200)))[0]
            tokens, num_outputs = [], 0
            async for output in llm.generate(PROMPT, streamed(RequestOutputKind.DELTA, max_tokens=200)):
                tokens += output.outputs[0].token_ids
                num_outputs += 1
                if num_outputs == 1:
                    await until(lambda: all_blocks_back(llm))  # the engine has finished meanwhile
            assert tokens == list(expected.outputs[0].token_ids)
            assert num_outputs <= 3 < len(tokens)  # the last delta may be on its way yet

    run(main())


def test_sequences_and_stop_strings_in_deltas(address: str) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as llm:
            params = streamed(RequestOutputKind.DELTA, temperature=1.0, seed=5, n=3, ignore_eos=True)
            texts, ends = ["", "", ""], [0, 0, 0]
            for output in await outputs_of(llm, params):
                for completion in output.outputs:
                    texts[completion.index] += completion.text
                    ends[completion.index] += completion.finish_reason is not None
            params.output_kind = RequestOutputKind.FINAL_ONLY
            final = (await outputs_of(llm, params))[0]
            assert texts == [completion.text for completion in final.outputs] and ends == [1, 1, 1]
            whole = texts[0]
            stop = whole[20:24]
            params = streamed(
                RequestOutputKind.DELTA, temperature=1.0, seed=5, n=3, ignore_eos=True, stop=stop
            )
            outputs = await outputs_of(llm, params)
            first = "".join(c.text for output in outputs for c in output.outputs if c.index == 0)
            assert first == whole[: whole.index(stop)]
            await until(lambda: all_blocks_back(llm))

    run(main())


def test_blocks_are_freed_when_a_consumer_stops_reading(address: str) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as llm:

            async def leaves() -> None:
                async for _ in llm.generate(PROMPT, ENDLESS):
                    break

            async def is_cancelled() -> None:
                task = asyncio.create_task(outputs_of(llm, ENDLESS))
                await until(lambda: there_are(llm, "running"))
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

            async def is_aborted() -> None:
                reasons = []
                async for output in llm.generate(PROMPT, ENDLESS, "mine"):
                    reasons.append(output.outputs[0].finish_reason)
                    await llm.abort("mine")
                assert reasons[-1] == "abort" and set(reasons[:-1]) <= {None}

            for way in (leaves, is_cancelled, is_aborted):
                await way()
                await until(lambda: all_blocks_back(llm))

    run(main())


def test_an_id_in_use_is_refused_and_its_owner_undisturbed(address: str) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as llm:
            task = asyncio.create_task(anext_of(llm.generate(PROMPT, ENDLESS, "same")))
            stream = await task
            with pytest.raises(ValueError, match="'same' is in use"):
                await anext_of(llm.generate(PROMPT, ENDLESS, "same"))
            assert not (await stream.__anext__()).finished
            await stream.aclose()
            await anext_of(llm.generate(PROMPT, ENDLESS, "same"))

    async def anext_of(stream: Any) -> Any:
        await stream.__anext__()
        return stream

    run(main())


@pytest.mark.parametrize("wait", [False, True])
def test_pausing(address: str, wait: bool) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as llm:
            params = streamed(RequestOutputKind.FINAL_ONLY, max_tokens=300, ignore_eos=True)
            before = asyncio.create_task(outputs_of(llm, params))
            await until(lambda: there_are(llm, "running"))
            await llm.pause_generation(wait_for_inflight_requests=wait)
            assert await llm.is_paused()
            ended = (await before)[0].outputs[0]
            assert ended.finish_reason == ("length" if wait else "abort")
            held = asyncio.create_task(outputs_of(llm, streamed(RequestOutputKind.FINAL_ONLY)))
            await until(lambda: there_are(llm, "waiting"))
            assert not held.done()
            await llm.resume_generation()
            assert not await llm.is_paused()
            assert (await held)[0].finished

    run(main())


def test_two_frontends_on_one_core_draw_other_seeds_and_the_same_tokens(address: str) -> None:
    async def main() -> None:
        async with AsyncLLM.attach(address) as one, AsyncLLM.attach(address) as other:
            seeded = streamed(RequestOutputKind.FINAL_ONLY, temperature=1.0, seed=3, ignore_eos=True)
            free = streamed(RequestOutputKind.FINAL_ONLY, temperature=3.0, ignore_eos=True)
            a, b, c, d = await asyncio.gather(
                outputs_of(one, seeded),
                outputs_of(other, seeded),
                outputs_of(one, free),
                outputs_of(other, free),
            )
            assert a[0].outputs[0].token_ids == b[0].outputs[0].token_ids
            assert c[0].outputs[0].token_ids != d[0].outputs[0].token_ids

    run(main())


def test_from_engine_args_to_shutdown() -> None:
    async def main() -> None:
        llm = AsyncLLM.from_engine_args(EngineArgs("demo", dtype="float32", kv_cache_memory_bytes=32 << 20))
        await llm.check_health()
        assert llm.is_running and (await llm.get_model_config()).model == "demo"
        await llm.sleep()
        assert await llm.is_sleeping()
        await llm.wake_up()
        cut = asyncio.create_task(outputs_of(llm, ENDLESS))
        await until(lambda: there_are(llm, "running"))
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await cut
        with pytest.raises(EngineDeadError, match="shut down"):
            await outputs_of(llm, ENDLESS)
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.check_health()
        assert llm.is_stopped
        llm.shutdown()

    run(main())
