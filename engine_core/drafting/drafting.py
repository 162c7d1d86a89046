"""Speculation with drafts of one method: which rows carry some, and when the next step waits for this one.

Drafts can only follow tokens that are known. A step that is planned while another one runs has none; so where
drafts are expected to pay, the next step is not planned ahead. Elsewhere all is as without a drafter: drafts of
n-grams and suffixes are compared with the tokens that come, without a step that verifies them, and so it is known
when they begin to pay.

In a pipeline no step waits for drafts. A sequence is planned there only when all of its tokens are known
(`micro_batches`), so its rows may always carry some, and the next row of one that does is planned when they have
been verified, as that of any other. Meanwhile the stages run the other micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pagewire.engine_core.drafting.acceptance import Acceptance, Ratio, reaches
from pagewire.engine_core.drafting.costs import MeasuredStep
from pagewire.engine_core.drafting.draft import TextDrafter, TokenDraft
from pagewire.engine_core.drafting.policy import LengthPolicy
from pagewire.engine_core.drafting.state import SequenceDrafts
from pagewire.engine_core.drafting.token_index import PORTION
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.speculation import SpeculationStats
from pagewire.engine_core.schedule.step import PlannedStep
from pagewire.ipc.wire.steps import Row, RowResult, StepResult

# After this many steps in which nothing was worth a wait, batches of more than a few rows look for drafts seldom:
# the search takes the core a few microseconds for each row, on a processor that the worker's threads may need.
QUIET_STEPS, SELDOM, FEW_ROWS = 16, 8, 4
LONGEST_WAIT = 0.1  # in seconds, that counts as one for a step that was planned late
FEW_TOKENS = 64  # that a source takes in at once in any case


@dataclass(frozen=True)
class DraftLimits:
    """longest: tokens of a draft. batch_size: no drafts while more sequences than this run or wait.
    num_tokens: no drafts for longer sequences. None: no such limit.
    """

    longest: int
    batch_size: int | None = None
    num_tokens: int | None = None


class Drafting:
    """Drafts of one method.

    drafter: proposes them in the core; None: the worker does. pipelined: steps are those of a pipeline of stages.
    """

    drafts = True

    def __init__(
        self,
        limits: DraftLimits,
        drafter: TextDrafter | None,
        policy: LengthPolicy,
        *,
        pipelined: bool = False,
    ) -> None:
        self.stats = SpeculationStats()
        self.policy = policy
        self._limits, self._drafter, self._pipelined = limits, drafter, pipelined
        self._acceptance = Acceptance()
        self._asked: dict[Sequence, int] = {}
        self._num_asked_new = 0
        self._expected: dict[Sequence, float] = {}  # of each one's drafts in flight, how many should be right
        self._num_expected, self._num_right = 0.0, 0  # of the step that is being committed
        self._num_taken_in = 0  # tokens of prompts, in the present call
        self._num_quiet = 0  # times that nothing was worth a wait, in succession
        self._paused = True
        self._awaited = -1  # the last step that the next one waits for

    # ------------------------------------------------------------ planning

    def waits(self, step: PlannedStep, running: Collection[Sequence], num_waiting: int) -> bool:
        """True if the step in flight carries drafts or asks for some, or if the next one would carry some."""
        if self._pipelined:
            return False
        if step.num_drafts or step.num_asked or step.step_id == self._awaited:
            return True
        if self._drafter is None or self._too_many(running, num_waiting):
            return False
        if self._is_quiet(step.step_id, len(running)):
            return False
        self._num_taken_in = 0
        rows = [s for s in running if s.num_pending == 1 and self._generates(s)]
        room = len(rows) * self._limits.longest
        if not rows or self.policy.hopeless(len(rows), room):
            return False
        found = [ahead for s in rows if (ahead := self._reaches_ahead(s))]
        pays = any(self.policy.lengths(len(rows), found, room)) if found else False
        self._note_whether(pays)
        if pays:
            self._awaited = step.step_id  # the core asks again whenever it has received something
        return pays

    def choose(
        self, running: Collection[Sequence], num_waiting: int, budget: int, *, ahead: bool
    ) -> dict[Sequence, list[int]]:
        """The drafts that pay."""
        self._asked, self._num_asked_new = {}, 0
        self._num_taken_in = 0
        ahead = ahead and not self._pipelined
        if self._too_many(running, num_waiting) or (ahead and self._drafter is not None):
            return {}
        rows = [s for s in running if s.decodes and self._generates(s)]
        room = (budget - len(rows)) // 2  # the rest is for prompts
        chosen = {} if ahead else self._chosen(rows, room)
        if self._drafter is None:
            self._ask(rows, room)
        return chosen

    def _chosen(self, rows: list[Sequence], room: int) -> dict[Sequence, list[int]]:
        if not rows or room <= 0 or (self._drafter is not None and self.policy.hopeless(len(rows), room)):
            return {}
        if self._pipelined and self._is_quiet(self._num_quiet, len(rows)):
            self._note_whether(pays=False)
            return {}
        found = [(s, draft) for s in rows if (draft := self._draft_of(s)) is not None]
        each = [self._state(s).chances_ahead(draft, 0, self._acceptance) for s, draft in found]
        lengths = self.policy.lengths(len(rows), each, room) if found else []
        if self._pipelined:
            self._note_whether(any(lengths))
        for (sequence, _), reach, length in zip(found, each, lengths, strict=True):
            if length:
                self._expected[sequence] = sum(reach[:length]) / self._acceptance.trust
        if not any(lengths):
            self._acceptance.regain_trust()
        return {
            sequence: draft.token_ids[:length]
            for (sequence, draft), length in zip(found, lengths, strict=True)
            if length
        }

    def _ask(self, rows: list[Sequence], room: int) -> None:
        """Decide how many drafts the worker proposes behind each row, and behind those of new sequences."""
        each = TokenDraft([0] * self._limits.longest, [1.0] * self._limits.longest)
        found = [self._state(s).chances_ahead(each, 0, self._acceptance) for s in rows]
        lengths = self.policy.lengths(len(rows), found, room) if rows else []
        for sequence, length in zip(rows, lengths, strict=True):
            self._asked[sequence] = length
            if not length:
                self._acceptance.recover(self._state(sequence).ratio)
        if not rows:
            lengths = self.policy.lengths(1, [reaches(each, self._acceptance.of(Ratio()))], room)
        self._num_asked_new = max(lengths)

    def num_asked(self, sequence: Sequence) -> int:
        """How many drafts the worker is asked for, to follow the next row of a sequence."""
        if self._drafter is not None or not self._generates(sequence):
            return 0
        left = sequence.max_output - sequence.num_output_tokens - sequence.num_pending - 1
        return max(
            0, min(self._asked.get(sequence, self._num_asked_new), left - 1)
        )  # the last one comes without

    def _is_quiet(self, number: int, num_rows: int) -> bool:
        """True for most steps while nothing was worth a wait for long. number: of a step in their order."""
        return self._num_quiet > QUIET_STEPS and bool(number % SELDOM) and num_rows > FEW_ROWS

    def _note_whether(self, pays: bool) -> None:
        self._num_quiet = 0 if pays else self._num_quiet + 1

    def _too_many(self, running: Collection[Sequence], num_waiting: int) -> bool:
        most = self._limits.batch_size
        return most is not None and len(running) + num_waiting > most

    def _generates(self, sequence: Sequence) -> bool:
        """True if a sequence may have drafts, as far as it is concerned itself."""
        most = self._limits.num_tokens
        return not sequence.pools and (most is None or len(sequence.token_ids) <= most)

    def _state(self, sequence: Sequence) -> SequenceDrafts:
        state = sequence.drafts
        if not isinstance(state, SequenceDrafts):
            source = None
            if self._drafter is not None:
                source = self._drafter.open(sequence.token_ids, shared=shared(sequence))
            state = sequence.drafts = SequenceDrafts(source, self._limits.longest)
        return state

    def _draft_of(self, sequence: Sequence) -> TokenDraft | None:
        """What may follow a sequence all of whose tokens are known, as far as its grammar and its length allow."""
        draft = self._current(sequence)
        if draft is None:
            return None
        most = sequence.max_output - sequence.num_output_tokens - 1
        if sequence.matcher is not None:
            most = min(most, sequence.matcher.num_fitting(draft.token_ids[:most]))
        return draft.part(0, max(0, most))

    def _reaches_ahead(self, sequence: Sequence) -> list[float]:
        """How likely drafts behind the token in flight are right, if that is what its own draft says."""
        draft = self._current(sequence)
        return [] if draft is None else self._state(sequence).chances_ahead(draft, 1, self._acceptance)

    def _current(self, sequence: Sequence) -> TokenDraft | None:
        """The draft behind the known tokens; None, too, for a long prompt while others are taken in."""
        state = self._state(sequence)
        if state.source is not None and (num_missing := state.source.num_missing) > FEW_TOKENS:
            if self._num_taken_in >= PORTION:
                return None
            self._num_taken_in += num_missing
        return state.current(len(sequence.token_ids))

    # ------------------------------------------------------------ committing

    def take(self, sequence: Sequence, row: Row, result: RowResult, num_tokens: int) -> int:
        """Compare a row's tokens with what was proposed, and keep what the worker proposes to follow them."""
        num_accepted = min(num_tokens, len(result.token_ids) - 1)
        if row.drafts:
            self._num_expected += self._expected.pop(sequence, 0.0)
            self._num_right += num_accepted
            self.stats.verified(len(row.drafts), num_accepted, num_tokens)
        if isinstance(sequence.drafts, SequenceDrafts):
            sequence.drafts.take(result.token_ids[:num_tokens], self._acceptance)
        if result.drafts:
            self._state(sequence).draft = TokenDraft(result.drafts, [1.0] * len(result.drafts))
        return num_accepted

    def forget(self, sequence: Sequence) -> None:
        """Drop what a sequence's worker has proposed."""
        self._expected.pop(sequence, None)
        if isinstance(sequence.drafts, SequenceDrafts):
            sequence.drafts.draft = None

    def end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended, and drop what was kept of it."""
        sequence.drafts = None
        if self._drafter is not None and not sequence.pools and shared(sequence):
            self._drafter.learn(sequence.output_token_ids)

    def measure(self, step: PlannedStep, result: StepResult, *, goes_on: bool) -> None:
        """Take in what a step took, with the wait before it: a step that is planned late has one.

        A step that also computes prompts says nothing.
        """
        paused, self._paused = self._paused, not goes_on
        num_expected, num_right = self._num_expected, self._num_right
        self._num_expected, self._num_right = 0.0, 0
        num_rows = sum(row.num_samples > 0 for row in step.rows)
        if not num_rows or step.num_prompt_tokens or not result.busy_us:
            return
        if step.num_drafts:
            self._acceptance.verified(num_expected, num_right)
        measured = MeasuredStep(
            num_rows,
            num_samples=sum(row.num_samples for row in step.rows),
            num_tokens=result.num_tokens,
            busy=result.busy_us / 1e6,
            idle=0.0 if paused else min(result.idle_us / 1e6, LONGEST_WAIT),
            late=step.late and not paused and not self._pipelined,
            drafted=bool(step.num_drafts or step.num_asked),
            verified=bool(step.num_drafts),
        )
        self.policy.observe(measured)
        seconds = measured.busy + measured.idle
        plain = self.policy.seconds(num_rows) or seconds
        changed = measured.drafted or measured.late
        without = plain * measured.num_tokens / num_rows if changed else seconds
        self.stats.ran(num_rows, measured.num_tokens, seconds, without)


def shared(sequence: Sequence) -> bool:
    """True if a sequence shares prefixes with others, so that its output may serve as drafts for them."""
    return not sequence.namespace and not sequence.request.prompt.cache_salt
