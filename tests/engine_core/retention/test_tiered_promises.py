"""Random lives of a scheduler with promises and a cold tier: what was promised stays, whatever is read."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from pagewire.engine_core.schedule.blocks import BlockPool
from tests.engine_core.retention.simulated import RetainedSimulation
from tests.engine_core.retention.test_retained_life import names, retentions, tenants
from tests.engine_core.schedule.test_scheduler_model import configs, endings, prompts
from tests.engine_core.tiers.simulated import TieredSimulation
from tests.engine_core.tiers.test_tiered_life import TieredLife


class TieredPromises(RetainedSimulation, TieredSimulation):
    """Blocks are held by sequences, promises and reads."""

    def _others(self, pool: BlockPool) -> Counter[int]:
        return RetainedSimulation._others(self, pool) + TieredSimulation._others(self, pool)


class TieredPromisesLife(TieredLife):
    """As `TieredLife`; requests ask for promises."""

    simulation: TieredPromises

    @initialize(
        config=configs,
        share=st.sampled_from([0.5, 1.0]),
        spare_tokens=st.integers(0, 60),
        num_states=st.sampled_from([0, 0, 4, 8, 20]),
        checkpoint_tokens=st.integers(1, 9),
        encoder_capacity=st.sampled_from([0, 0, 6]),
        cuts_media=st.booleans(),
        launch_steps=st.sampled_from([1, 2, 40]),
    )
    def begin(  # type: ignore[override]
        self,
        config: dict[str, int],
        share: float,
        spare_tokens: int,
        num_states: int,
        launch_steps: int,
        **more: object,
    ) -> None:
        self.simulation = TieredPromises(
            share,
            **config | {"stages": 1},
            num_blocks=(32 + spare_tokens) // config["block_size"],
            num_states=num_states,
            launch_steps=1 if num_states else launch_steps,
            **more,
        )

    @rule(
        prompt=prompts,
        ending=endings,
        salt=st.sampled_from([None, "a"]),
        tenant=tenants,
        retention=retentions,
    )
    def submit_retained(self, prompt: list[int], ending: dict[str, object], **more: object) -> None:
        self.simulation.submit(prompt, **ending, **more)  # type: ignore[arg-type]

    @rule(name=names, tenant=tenants)
    def release(self, name: str, tenant: str) -> None:
        self.simulation.release(name, tenant)


TestTieredPromisesLife = TieredPromisesLife.TestCase
TestTieredPromisesLife.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
