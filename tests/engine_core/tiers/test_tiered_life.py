"""Random lives of a scheduler with a cold tier: every request gets the result that it would get alone."""

from __future__ import annotations

import os

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from tests.engine_core.schedule.simulation import drafting
from tests.engine_core.schedule.test_scheduler_model import SchedulerLife, configs
from tests.engine_core.tiers.simulated import TieredSimulation


class TieredLife(SchedulerLife):
    """As `SchedulerLife`; reads end at any time, or fail, blocks go from the tier, and other cores tell lies.

    What is evicted also goes to swap space, which may be smaller or larger than the cache, on disk, or to both.
    """

    simulation: TieredSimulation

    @initialize(
        config=configs,
        num_peers=st.integers(0, 2),
        keeps=st.booleans(),
        swap_size=st.sampled_from([(0, 0), (1, 1), (4, 2), (9, 9), (60, 30)]),
        preemption=st.sampled_from(["auto", "auto", "swap", "recompute"]),
        spare_tokens=st.integers(0, 40),
        share_prefixes=st.sampled_from([True, True, True, False]),
        short_length=st.sampled_from([0, 0, 9]),
        num_states=st.sampled_from([0, 0, 2, 3, 5, 20]),
        checkpoint_tokens=st.integers(1, 9),
        encoder_capacity=st.sampled_from([0, 0, 6]),
        encoder_layers=st.sampled_from([0, 3]),
        cuts_media=st.booleans(),
        launch_steps=st.sampled_from([1, 2, 40]),
        drafts=st.none()
        | st.tuples(st.sampled_from(["random", "ngram"]), st.integers(0, 2**16), st.integers(1, 5)),
    )
    def begin(  # type: ignore[override]
        self,
        config: dict[str, int],
        num_peers: int,
        keeps: bool,
        swap_size: tuple[int, int],
        spare_tokens: int,
        num_states: int,
        launch_steps: int,
        drafts: tuple[str, int, int] | None,
        **more: object,
    ) -> None:
        self.simulation = TieredSimulation(
            **config | {"stages": 1},
            num_peers=num_peers,
            keeps=keeps or not (num_peers or swap_size[0]),
            swap_size=swap_size,
            num_blocks=(32 + spare_tokens) // config["block_size"],
            drafter=drafting(*drafts) if drafts else None,
            num_states=num_states,
            launch_steps=1 if drafts or num_states else launch_steps,
            **more,
        )

    @precondition(lambda self: self.simulation.pending)
    @rule(fails=st.sampled_from([0, 0, 1, 2, 6, 2**20 - 1]))
    def finish_read(self, fails: int) -> None:
        self.simulation.finish_read(fails)

    @precondition(lambda self: self.simulation.tier)
    @rule(data=st.data())
    def lose_a_block(self, data: st.DataObject) -> None:
        """The tier makes room; the core hears of it, or not yet."""
        name = data.draw(st.sampled_from(sorted(self.simulation.tier)))
        del self.simulation.tier[name]
        if data.draw(st.booleans()):
            self.simulation.reads.names.discard(name)

    @precondition(lambda self: self.simulation.questions)
    @rule(lies=st.sampled_from([0, 0, 1, 2, 6, 2**20 - 1]))
    def answer(self, lies: int) -> None:
        self.simulation.answer(lies)

    @precondition(lambda self: self.simulation.questions)
    @rule()
    def leave_unanswered(self) -> None:
        self.simulation.leave_unanswered()

    @precondition(lambda self: self.simulation.parts)
    @rule(fails=st.sampled_from([0, 0, 1, 2, 6, 2**20 - 1]))
    def finish_fetch(self, fails: int) -> None:
        self.simulation.finish_fetch(fails)

    @precondition(lambda self: not self.simulation.scheduler.in_flight and not self.simulation.queue)
    @rule()
    def move_elsewhere(self) -> None:
        self.simulation.move_elsewhere()

    @rule()
    def ask_again(self) -> None:
        self.simulation.reads.peers.forget_asked()

    @rule()
    def expire_reads(self) -> None:
        self.simulation.expire_reads()

    @rule()
    def forget_tier(self) -> None:
        self.simulation.forget_tier()


TestTieredLife = TieredLife.TestCase
TestTieredLife.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
