"""One rank of a group fails at what the others can do: all take the same way, or the group ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagewire.ipc.wire.worker_messages import WorkerCall, WorkerReply
from pagewire.workers.errors import LoadError, LostRankError
from pagewire.workers.network import loading
from pagewire.workers.process.main import answer
from pagewire.workers.run.runner import Runner
from tests.workers.architectures import VOCAB_SIZE
from tests.workers.driver import Driver, load_runner
from tests.workers.parallel.threads import Rank, run_ranks
from tests.workers.parity import NUM_TOKENS, make_prompts

PROMPTS = make_prompts(VOCAB_SIZE)


def ask(runner: Runner, method: str, *args: Any) -> WorkerReply:
    """The reply of one rank to a call."""
    return answer(runner, WorkerCall(0, method, list(args)))


def test_all_ranks_stay_asleep_if_one_has_too_little_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {1}  # the ranks without memory
    allocate_kv = Runner.allocate_kv

    def allocate(runner: Runner) -> None:
        if runner.collective.rank in short and asleep[0]:
            raise LoadError("cannot allocate 7 bytes of KV memory")
        allocate_kv(runner)

    asleep = [False]
    monkeypatch.setattr(Runner, "allocate_kv", allocate)

    def work(rank: Rank) -> list[object]:
        runner, _ = load_runner(llama, collective=rank)
        before = Driver(runner).generate(PROMPTS, NUM_TOKENS)
        ask(runner, "sleep", 1)
        asleep[0] = True
        refused = ask(runner, "wake_up")
        caches = len(runner.caches)
        rank.barrier()
        short.clear()
        woken = ask(runner, "wake_up")
        after = Driver(runner).generate(PROMPTS, NUM_TOKENS)
        return [refused.error, refused.error_type, caches, woken.error, after == before]

    other = "another rank of the group has too little memory for its KV cache"
    assert run_ranks(2, work) == [
        [other, "RuntimeError", 0, None, True],
        ["cannot allocate 7 bytes of KV memory", "RuntimeError", 0, None, True],
    ]


@pytest.mark.parametrize(("error", "named"), [(MemoryError, "MemoryError"), (LoadError, "RuntimeError")])
def test_a_rank_ends_if_it_fails_while_the_others_load(
    llama: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], named: str
) -> None:
    load_weights = Runner.load_weights

    def fail(runner: Runner) -> None:
        if runner.collective.rank == runner.collective.size - 1:
            raise error("no memory is left")
        load_weights(runner)

    monkeypatch.setattr(Runner, "load_weights", fail)

    def work(rank: Rank) -> WorkerReply:
        runner, _ = load_runner(llama, collective=rank)
        ask(runner, "sleep", 2)
        return ask(runner, "wake_up")

    with pytest.raises(LostRankError, match="no memory is left"):
        run_ranks(2, work)
    alone, _ = load_runner(llama)
    ask(alone, "sleep", 2)
    reply = ask(alone, "wake_up")
    assert (reply.error, reply.error_type) == ("no memory is left", named)


def test_what_one_rank_cannot_pack_as_a_stack_none_does(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one says why, the others where, and none waits for another."""
    build_network = loading.build_network

    def build(base: Any, weights: Any, *more: Any, **others: Any) -> Any:
        if weights.shards.collective.rank == 1:
            raise LoadError("its columns cut a group")
        return build_network(base, weights, *more, **others)

    monkeypatch.setattr(loading, "build_network", build)

    def work(rank: Rank) -> None:
        why = "its columns cut a group" if rank.rank == 1 else "the log of another worker says why"
        with pytest.raises(LoadError, match=rf"served without tensor_parallel_size: .*\({why}\)"):
            load_runner(llama, collective=rank)

    run_ranks(2, work)
