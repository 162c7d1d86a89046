"""Random operations on a scheduler with promises: each promise is kept, no block is lost, and all requests end."""

from __future__ import annotations

import os

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pagewire.ipc.wire.items import Retention
from tests.engine_core.retention.simulated import RetainedSimulation
from tests.engine_core.schedule.simulation import drafting
from tests.engine_core.schedule.test_scheduler_model import SchedulerLife, configs, endings, prompts

names = st.sampled_from(["", "", "s", "t"])
tenants = st.sampled_from(["", "alice", "bob"])
retentions = st.lists(
    st.builds(
        Retention,
        st.sampled_from([0.5, 3.0, 20.0, 200.0]),
        names,
        st.sampled_from([0, 0, 3, 8]),
        st.booleans(),
    ),
    min_size=1,
    max_size=3,
)


class RetainedLife(SchedulerLife):
    """As `SchedulerLife`; requests ask for promises, which end by time, by a call, or with the memory."""

    simulation: RetainedSimulation

    @initialize(
        config=configs,
        share=st.sampled_from([0.1, 0.5, 1.0]),
        spare_tokens=st.integers(0, 60),
        share_prefixes=st.sampled_from([True, True, True, False]),
        short_length=st.sampled_from([0, 0, 9]),
        num_states=st.sampled_from([0, 0, 2, 4, 8, 20]),
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
        share: float,
        spare_tokens: int,
        num_states: int,
        launch_steps: int,
        drafts: tuple[str, int, int] | None,
        **more: object,
    ) -> None:
        self.simulation = RetainedSimulation(
            share,
            **config,
            num_blocks=(32 + spare_tokens) // config["block_size"],
            num_states=num_states,
            drafter=drafting(*drafts, pipelined=config["stages"] != 1) if drafts else None,
            launch_steps=1 if drafts or num_states or config["stages"] != 1 else launch_steps,
            **more,
        )

    @rule(
        prompt=prompts,
        ending=endings,
        n=st.sampled_from([1, 1, 2]),
        salt=st.sampled_from([None, "a"]),
        tenant=tenants,
        retention=retentions,
    )
    def submit_retained(self, prompt: list[int], ending: dict[str, object], **more: object) -> None:
        self.simulation.submit(prompt, **ending, **more)  # type: ignore[arg-type]

    @rule(seconds=st.sampled_from([1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.simulation.wait(seconds)

    @rule(name=names, tenant=tenants)
    def release(self, name: str, tenant: str) -> None:
        self.simulation.release(name, tenant)


TestRetainedLife = RetainedLife.TestCase
TestRetainedLife.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
