"""`AsyncEngineCalls`: the calls of `pagewire.ipc.wire.calls.EngineCalls`, for asyncio programs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from pagewire.ipc.compatibility import KnowsAttributes
from pagewire.ipc.wire.calls import DECLARED, EngineCalls, RemoteCall

P = ParamSpec("P")
R = TypeVar("R")


class AsyncCaller(KnowsAttributes):
    """Base of what makes calls in an event loop. A subclass says how the answer of the core is awaited."""

    async def _answer(self, call: RemoteCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Send the call and await the core's answer. The arguments are those of the method that declares it."""
        raise NotImplementedError


def make_awaited(
    method: Callable[Concatenate[EngineCalls, P], R],
) -> Callable[Concatenate[AsyncCaller, P], Coroutine[Any, Any, R]]:
    """The asynchronous form of a method of `EngineCalls`: the same arguments, answer and docstring."""
    call = DECLARED[method]

    @functools.wraps(method)
    async def answer(self: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = call.answer(await self._answer(call, args, kwargs))
        return result

    return answer


class AsyncEngineCalls(AsyncCaller):
    """The calls that act on the engine as a whole, as coroutines."""

    pause_generation = make_awaited(EngineCalls.pause_generation)
    resume_generation = make_awaited(EngineCalls.resume_generation)
    is_paused = make_awaited(EngineCalls.is_paused)
    reset_prefix_cache = make_awaited(EngineCalls.reset_prefix_cache)
    release_prefixes = make_awaited(EngineCalls.release_prefixes)
    reset_mm_cache = make_awaited(EngineCalls.reset_mm_cache)
    sleep = make_awaited(EngineCalls.sleep)
    wake_up = make_awaited(EngineCalls.wake_up)
    is_sleeping = make_awaited(EngineCalls.is_sleeping)
    abort_any = make_awaited(EngineCalls.abort_any)
    collective_rpc = make_awaited(EngineCalls.collective_rpc)
    save_sharded_state = make_awaited(EngineCalls.save_sharded_state)
    remove_lora = make_awaited(EngineCalls.remove_lora)
    list_loras = make_awaited(EngineCalls.list_loras)
    pin_lora = make_awaited(EngineCalls.pin_lora)
    start_profile = make_awaited(EngineCalls.start_profile)
    stop_profile = make_awaited(EngineCalls.stop_profile)


def timed_out(
    call: RemoteCall, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float
) -> TimeoutError:
    """The error for a call that was not answered in time."""
    arguments = call.signature.bind(*args, **kwargs).arguments
    return TimeoutError(f"{arguments.get('method', call.name)} has not returned within {seconds} s")
