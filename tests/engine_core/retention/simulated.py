"""A simulated scheduler and worker (`simulation.py`) with promised prefixes, checked by a list of promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from pagewire.engine_core.retention.promises import PrefixPromises, RetentionLimits
from pagewire.engine_core.schedule.blocks import BlockPool
from pagewire.engine_core.schedule.scheduler import SchedulerConfig
from pagewire.engine_core.schedule.sequence import Sequence, State
from pagewire.engine_core.schedule.step import Outcome
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.ipc.wire.items import RetainedPrefix, Retention
from pagewire.ipc.wire.messages import TokenDelta
from tests.engine_core.schedule.simulation import Simulation


class RetainedSimulation(Simulation):
    """What was promised is found until its end, after every event.

    share: of the blocks for promises.
    """

    def __init__(self, share: float = 0.5, *, share_prefixes: bool = True, **config: Any) -> None:
        config = {"max_model_len": 32, "num_blocks": 16, "block_size": 4, **config}
        drafter = config.pop("drafter", None)
        beside = {"short_length", "cuts_media", "num_states", "checkpoint_tokens"}
        beside |= {"encoder_capacity", "encoder_layers"}
        more = {name: config.pop(name) for name in beside & config.keys()}
        num_states = more.get("num_states", 0)
        limits = RetentionLimits.of(SchedulerConfig(**config), num_states, share, caches=share_prefixes)
        self.promises = PrefixPromises(limits)
        # Names of blocks, the name and the tenant of the promise, and its end, as the deltas said.
        self.promised: list[tuple[list[bytes], str, str, float]] = []
        super().__init__(
            share_prefixes=share_prefixes, drafter=drafter, retained=self.promises, **more, **config
        )

    def release(self, name: str, tenant: str = "") -> int:
        """Release promises by name."""
        released = self.promises.release(tenant or b"client", name, self.scheduler.kv)
        self.promised = [each for each in self.promised if (each[1], each[2]) != (name, tenant)]
        self.check()
        return released

    def fail(self) -> list[Outcome]:
        self.promised.clear()
        return super().fail()

    def reset_prefix_cache(self) -> bool:
        if not self.scheduler.running:
            self.promised.clear()
        return super().reset_prefix_cache()

    def wait(self, seconds: float) -> None:
        """Nothing happens for a time."""
        self.now += seconds
        self.scheduler.sequences.tick(self.now)
        self.check()

    def retained(self, sequence: Sequence) -> RetainedPrefix:
        """What became of the only wish of a request that has ended."""
        (retained,) = self.streams[sequence].deltas[-1].retained
        return retained

    def abort(self, sequences: Collection[Sequence]) -> None:  # type: ignore[override]
        running = [sequence for sequence in sequences if sequence.state is State.RUNNING]
        check, self.check = self.check, lambda: None  # type: ignore[method-assign]
        super().abort(sequences)
        self.check = check  # type: ignore[method-assign]
        for sequence in running:
            self._note(sequence, sequence.retained)
        self.check()

    def _hear_delta(self, sequence: Sequence, stream: Any, delta: TokenDelta) -> None:
        super()._hear_delta(sequence, stream, delta)
        if delta.finish_reason != "error":
            self._note(sequence, delta.retained)
        elif self.promises.num_promises:  # else the workers are lost
            self._note(sequence, sequence.retained)

    def _note(self, sequence: Sequence, retained: Collection[RetainedPrefix]) -> None:
        now = self.promises._now
        for wish, got in zip(sequence.request.retention if retained else (), retained, strict=True):
            assert got.num_tokens % self.config.block_size == 0
            names = sequence.block_names[: got.num_tokens // self.config.block_size]
            if names:
                self.promised.append((names, wish.name, sequence.request.tenant, now + wish.seconds))

    def check(self) -> None:
        super().check()
        kv, promises = self.scheduler.kv, self.promises
        slots = kv.group(StateSlots)
        self.promised = [each for each in self.promised if each[3] > promises._now]
        held = {name for names, *_ in self.promised for name in names}
        for names, *_ in self.promised:
            assert all(kv.pool.find(name) is not None for name in names), "a promise was broken"
            if slots is not None:
                assert slots.pool.find(names[-1]) is not None, "states of a promise are gone"
        assert {block.name for block in promises._held} == held, "blocks are held that nobody was promised"
        assert len(held) == promises.num_blocks <= max(0, promises.limits.num_blocks)
        assert len(promises._held_states) <= promises.limits.num_states
        for tenant, own in promises._tenants.items():
            name = "" if tenant == b"client" else tenant
            assert {block.name for block in own.held} == {
                block_name for names, _, whose, _ in self.promised if whose == name for block_name in names
            }

    def _others(self, pool: BlockPool) -> Counter[int]:
        held = self.promises._held if pool is self.scheduler.kv.pool else self.promises._held_states
        return Counter([block.block_id for block in held])


def wish(seconds: float = 100.0, **more: Any) -> list[Retention]:
    """One wish."""
    return [Retention(seconds, **more)]
