"""Random lives of a scheduler: whatever happens, every request gets the result that it would get alone."""

from __future__ import annotations

import os
import struct
import sys

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.items import Media
from pagewire.ipc.wire.pooling import PoolingParams
from tests.engine_core.schedule.simulation import EOS, STOP, VOCAB, Simulation, drafting, expected

DOCUMENTS = ([2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 2, 4, 6, 8, 10], [2, 3, 4, 5, 6, 7, 8, 9, 3, 3, 3, 5, 7, 9])

prompts = st.builds(
    lambda document, length, tail: [*document[:length], *tail] or [2],
    st.sampled_from(DOCUMENTS),
    st.integers(0, 15),
    st.lists(st.integers(0, VOCAB - 1), max_size=4),
)
endings = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 9) | st.none(),
        "min_tokens": st.just(0),
        "eos": st.sampled_from([None, EOS]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([None, [STOP], [STOP, EOS]]),
    }
) | st.fixed_dictionaries(
    {"max_tokens": st.integers(4, 9), "min_tokens": st.integers(1, 4), "eos": st.just(EOS)}
)
PICTURE = Tensor("uint8", (0,), b"")


def numbered(length: int) -> Tensor:
    """Embeddings of one number, which counts them."""
    return Tensor("float16", (length, 1), struct.pack(f"{length}e", *range(length)))


media = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 6), st.sampled_from([b"cat", b"dog", b"owl"])),
    min_size=1,
    max_size=3,
)
grammars = st.sampled_from([None, None, "([a-e][f-k]){1,4}", "[a-k]*", "c*(a|bd)?", "[ab]{3}"])
configs = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([1, 2, 4]),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 24),
        "policy": st.sampled_from(["fcfs", "priority"]),
        "depth": st.sampled_from([1, 2, 3]),
        "stages": st.sampled_from([1, 1, 2, 3]),
        "watermark": st.sampled_from([0.0, 0.1, 0.3]),
        "step_seconds": st.sampled_from([0.0, 0.001, 0.004, 1.0]),
    }
)


def under(regex: str | None, ending: dict[str, object]) -> dict[str, object]:
    """The parameters of a request, with a grammar."""
    return ending if regex is None else {**ending, "structured_outputs": {"regex": regex}}


class SchedulerLife(RuleBasedStateMachine):
    """Events in any order. The checks are in `Simulation`."""

    @initialize(
        config=configs,
        spare_tokens=st.integers(0, 40),
        share_prefixes=st.booleans(),
        short_length=st.sampled_from([0, 0, 3, 9, 14]),
        num_states=st.sampled_from([0, 0, 2, 3, 5, 8, 20]),
        checkpoint_tokens=st.integers(1, 9),
        encoder_capacity=st.sampled_from([0, 0, 3, 6, 12]),
        encoder_layers=st.sampled_from([0, 1, 2, 5, 20]),
        cuts_media=st.booleans(),
        launch_steps=st.sampled_from([1, 2, 5, 40]),
        drafts=st.none()
        | st.tuples(
            st.sampled_from(["random", "ngram", "suffix", "worker"]), st.integers(0, 2**16), st.integers(1, 5)
        ),
    )
    def begin(
        self,
        config: dict[str, object],
        spare_tokens: int,
        share_prefixes: bool,
        short_length: int,
        num_states: int,
        checkpoint_tokens: int,
        encoder_capacity: int,
        encoder_layers: int,
        cuts_media: bool,
        launch_steps: int,
        drafts: tuple[str, int, int] | None,
    ) -> None:
        block_size = config["block_size"]
        assert isinstance(block_size, int)
        num_blocks = (32 + spare_tokens) // block_size
        drafter = drafting(*drafts, pipelined=config["stages"] != 1) if drafts else None
        self.simulation = Simulation(
            **config,
            num_blocks=num_blocks,
            share_prefixes=share_prefixes,
            drafter=drafter,
            short_length=short_length,
            num_states=num_states,
            checkpoint_tokens=checkpoint_tokens,
            encoder_capacity=encoder_capacity,
            encoder_layers=encoder_layers,
            cuts_media=cuts_media,
            launch_steps=1 if drafts or num_states or config["stages"] != 1 else launch_steps,
        )

    @rule(
        prompt=prompts,
        ending=endings,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        seed=st.integers(0, 3),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "a", "b"]),
        adapter=st.sampled_from([b"", b"", b"a"]),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        tenant=st.sampled_from(["", "", "alice", "bob"]),
        rank=st.sampled_from([0, 0, 0, 1, 5]),
        regex=grammars,
    )
    def submit(self, prompt: list[int], ending: dict[str, object], regex: str | None, **more: object) -> None:
        self.simulation.submit(prompt, **under(regex, ending), **more)  # type: ignore[arg-type]

    @rule(
        prompt=prompts,
        all_tokens=st.booleans(),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, "a"]),
    )
    def submit_to_pool(self, prompt: list[int], all_tokens: bool, **more: object) -> None:
        self.simulation.submit(prompt, pool=PoolingParams(all_tokens=all_tokens), **more)  # type: ignore[arg-type]

    @rule(
        places=media,
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 6),
        pool=st.sampled_from([None, None, PoolingParams(all_tokens=True)]),
        prompt_logprobs=st.sampled_from([None, 0]),
        embedded=st.booleans(),
    )
    def submit_media(
        self,
        places: list[tuple[int, int, bytes]],
        tail: int,
        pool: PoolingParams | None,
        embedded: bool,
        **params: object,
    ) -> None:
        """Media that fit a step, or embeddings, with some tokens before, between and behind them."""
        prompt: list[int] = []
        found: list[Media] = []
        for gap, length, name in places:
            prompt += range(2, 2 + gap)
            if embedded:
                found.append(Media(len(prompt), length, name, numbered(length), True))
            else:
                length = min(length, self.simulation.config.max_num_batched_tokens)
                found.append(Media(len(prompt), length, name, PICTURE))
            prompt += [2] * length
        prompt += range(5, 5 + tail)
        self.simulation.submit(prompt, media=found, pool=pool, **params)  # type: ignore[arg-type]

    @rule(data=st.data(), prompt=prompts, ending=endings, n=st.sampled_from([1, 2]), regex=grammars)
    def resubmit(
        self, data: st.DataObject, prompt: list[int], ending: dict[str, object], n: int, regex: str | None
    ) -> None:
        """A request comes with tokens that a core now lost gave it."""
        ending = under(regex, ending)
        own = self.simulation
        trial = Simulation(share_prefixes=own.share_prefixes, short_length=own.short_length)
        trial.num_added = self.simulation.num_added
        outputs = [expected(request)[0] for request in trial.submit(prompt, n=n, **ending)]  # type: ignore[arg-type]
        done = [output[: data.draw(st.integers(0, max(0, len(output) - 1)))] for output in outputs]
        self.simulation.submit(prompt, n=n, done=done, **ending)  # type: ignore[arg-type]

    @precondition(lambda self: len(self.simulation.scheduler.in_flight) < self.simulation.config.depth)
    @rule()
    def plan(self) -> None:
        self.simulation.plan()

    @precondition(lambda self: self.simulation.results)
    @rule()
    def commit(self) -> None:
        self.simulation.commit()

    @rule(steps=st.integers(1, 6))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.simulation.step()

    @precondition(lambda self: self.simulation.results)
    @rule(data=st.data())
    def commit_with_an_error(self, data: st.DataObject) -> None:
        rows = self.simulation.scheduler.in_flight[0].rows
        self.simulation.commit(errors={data.draw(st.integers(0, len(rows) - 1)): "not a number"})

    @precondition(lambda self: self.simulation.live())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.simulation.abort([data.draw(st.sampled_from(self.simulation.live()))])

    @rule()
    def fail(self) -> None:
        self.simulation.fail()

    @rule()
    def preempt_all(self) -> None:
        self.simulation.preempt_all()

    @precondition(lambda self: self.simulation.encoder)
    @rule()
    def reset_encoder_cache(self) -> None:
        encoder = self.simulation.encoder
        assert encoder is not None
        encoder.reset()
        assert all(entry.num_refs for entry in encoder._entries.values())

    @rule()
    def reset_prefix_cache(self) -> None:
        self.simulation.reset_prefix_cache()

    def teardown(self) -> None:
        if sys.exc_info()[0] is None:
            self.simulation.drain()


TestSchedulerLife = SchedulerLife.TestCase
TestSchedulerLife.settings = settings(
    max_examples=500,
    stateful_step_count=50,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
