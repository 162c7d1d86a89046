"""Opens the drafts of an engine, if its options ask for some."""

from __future__ import annotations

from pagewire.engine_core.drafting.draft import TextDrafter
from pagewire.engine_core.drafting.drafting import Drafting, DraftLimits
from pagewire.engine_core.drafting.ngram import NgramDrafter
from pagewire.engine_core.drafting.policy import MeasuredPolicy
from pagewire.engine_core.drafting.suffix import SuffixDrafter
from pagewire.engine_core.schedule.speculation import NoSpeculation, Speculation
from pagewire.ipc.speculative import SpeculativeConfig


def open_speculation(config: SpeculativeConfig | None, *, pipelined: bool = False) -> Speculation:
    """The drafts of an engine, by its options. pipelined: its workers are a pipeline of several stages."""
    if config is None:
        return NoSpeculation()
    drafter: TextDrafter | None = None
    if config.method == "ngram":
        drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    elif config.method == "suffix":
        drafter = SuffixDrafter()
    limits = DraftLimits(config.num_speculative_tokens, config.disable_by_batch_size, config.max_model_len)
    return Drafting(limits, drafter, MeasuredPolicy(), pipelined=pipelined)
