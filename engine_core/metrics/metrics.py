"""The metrics of the engine, under the names that existing dashboards use.

Counters and gauges are read from the core on request (`snapshot`). Only histograms are updated while the engine
runs, once per step: sequences whose tokens are equally far apart are added with one `observe`.

A `vllm:` name means what it means in vLLM; metrics of this engine alone begin with `pagewire:`. A request for n
sequences counts once, from its arrival to the end of its last sequence; only the times between tokens are those of
each sequence. Times are in seconds.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from pagewire.engine_core.config.config import EngineConfig
from pagewire.engine_core.grammar.pool import Grammars
from pagewire.engine_core.media.encoder_cache import EncoderCache
from pagewire.engine_core.metrics.reports import ReportedEngine, num_restarts, phases
from pagewire.engine_core.retention.promises import PrefixPromises
from pagewire.engine_core.schedule.sequence import Sequence
from pagewire.engine_core.schedule.speculation import SpeculationStats
from pagewire.engine_core.schedule.step import PlannedStep, SchedulerStats, StepOutcomes
from pagewire.engine_core.states.state_slots import StateSlots
from pagewire.engine_core.tenants.accounts import Accounts
from pagewire.engine_core.tiers.tier import ColdTier
from pagewire.engine_core.wings.wing import Wing
from pagewire.ipc.distribution import Distribution
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.wire.pooling import ENGINE_TASKS
from pagewire.ipc.wire.steps import StepResult, Way

Row = dict[str, Any]
TOKEN_GAP = attrgetter("token_gap")

MAX_ADAPTER_NAMES = 100  # in a label
MAX_TENANTS = 100  # values of the label "tenant"
PREEMPTION_WARNING_SECONDS = (
    60.0  # between two warnings of preemptions, of which an overloaded engine has many
)
REASONS = ("stop", "length", "abort", "error")  # a request ended for the last of those of its sequences

# Bucket bounds: seconds, except STEP_TOKENS and SEQUENCES. Those of `vllm:` metrics are vLLM's.
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
    2560.0,
)
PER_TOKEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
PER_REQUEST = (
    0.01,
    0.05,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
    960.0,
    1920.0,
    7680.0,
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)
STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)
ITERATION = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0)


class Rates:
    """What happened between the last two calls of `update`.

    prompt, output: tokens per second. tokens_per_step: of each sequence, in steps that computed no prompts.
    gain: by which factor drafts made these steps faster. Both are 0 without such steps.
    """

    def __init__(self) -> None:
        self.prompt = self.output = 0.0
        self.tokens_per_step = self.gain = 0.0
        self._counts, self._time = (0, 0), 0.0
        self._drafted = (0.0, 0.0, 0.0, 0.0)

    def update(self, stats: SchedulerStats, drafts: SpeculationStats, now: float) -> None:
        """Recompute the rates at monotonic time `now`."""
        counts, seconds = (stats.num_prompt_tokens, stats.num_output_tokens), now - self._time
        self.prompt, self.output = (
            (new - old) / seconds for new, old in zip(counts, self._counts, strict=True)
        )
        self._counts, self._time = counts, now
        drafted = (drafts.num_tokens, drafts.num_steps, drafts.seconds_without, drafts.seconds)
        tokens, steps, without, spent = (a - b for a, b in zip(drafted, self._drafted, strict=True))
        self.tokens_per_step, self.gain = tokens / max(1, steps), without / spent if spent else 0.0
        self._drafted = drafted


class PreemptionWarnings:
    """Decides when to warn of preemptions for lack of KV cache: at the first, and then at most once a minute."""

    def __init__(self) -> None:
        self._num_known, self._next = 0, -math.inf

    def text(self, num_preemptions: int, now: float) -> str | None:
        """The warning that is due at monotonic time `now`, or None. num_preemptions: since the core started."""
        if num_preemptions == self._num_known or now < self._next:
            return None
        new = num_preemptions - self._num_known
        self._num_known, self._next = num_preemptions, now + PREEMPTION_WARNING_SECONDS
        return (
            f"{new} preemptions for lack of KV cache ({num_preemptions} since the start): what the cache loses of "
            "these sequences is computed again, or copied back with --swap-space, which takes time; give the cache "
            "more memory by --gpu-memory-utilization or --kv-cache-memory-bytes, divide the model among more "
            "devices by --tensor-parallel-size, or run fewer sequences at a time by --max-num-seqs"
        )


@dataclass(slots=True)
class OpenRequest:
    """What the metrics keep of a request until the last of its n sequences ends.

    num_open: unfinished sequences. scheduled_time, first_token_time: those of the first sequence that got there; 0
    until then. reason: why the sequences that have ended did. Times are in seconds on the monotonic clock.
    """

    num_open: int
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    reason: str = REASONS[0]

    def end(self, sequence: Sequence, reason: str) -> None:
        """Add what a sequence that has ended contributes."""
        self.num_open -= 1
        self.num_output_tokens += sequence.num_output_tokens
        self.reason = max(self.reason, reason, key=REASONS.index)
        if sequence.scheduled_time:
            self.scheduled_time = min(self.scheduled_time or sequence.scheduled_time, sequence.scheduled_time)


class Metrics(Wing):
    """Histograms and counters that are updated while the engine runs.

    engine_id: names the engine in the labels of all metrics, for it may report through several servers.
    num_open: unfinished requests.
    """

    def __init__(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        self.engine_id = os.urandom(4).hex()
        self.num_open = 0
        self._requests: dict[Sequence, OpenRequest] = {}  # by unfinished sequence
        self.first_token = Distribution(FIRST_TOKEN)
        self.between_tokens = Distribution(PER_TOKEN)
        self.per_token = Distribution(PER_TOKEN)
        self.whole = Distribution(PER_REQUEST)
        self.queued = Distribution(PER_REQUEST)
        self.inference = Distribution(PER_REQUEST)
        self.prefill = Distribution(PER_REQUEST)
        self.decode = Distribution(PER_REQUEST)
        self.prompt_tokens = Distribution(lengths)
        self.output_tokens = Distribution(lengths)
        self.params_n = Distribution(SEQUENCES)
        self.params_best_of = Distribution(SEQUENCES)
        self.params_max_tokens = Distribution(lengths)
        self.step_tokens = Distribution(STEP_TOKENS)
        self.step_seconds = Distribution(STEP)
        self.stream_gaps = Distribution(PER_TOKEN)
        self.iteration_seconds = Distribution(ITERATION)
        self.grammar = Distribution(PER_REQUEST)
        self.rates = Rates()
        self.preemption_warnings = PreemptionWarnings()
        self.num_refused = {"busy": 0, "invalid": 0}
        self.num_finished = dict.fromkeys(REASONS, 0)
        self.num_pooling = dict.fromkeys(ENGINE_TASKS, 0)

    def submitted(self, group: list[Sequence]) -> None:
        """Record a new request, given its n sequences."""
        first = group[0]
        self.num_open += 1
        first.tenant.num_requests += 1
        request = OpenRequest(len(group), first.arrival_time, first.num_prompt_tokens)
        self._requests.update(dict.fromkeys(group, request))
        if first.pools:
            self.num_pooling[str(first.request.task.task)] += 1  # type: ignore[union-attr]
            return
        self.params_n.observe(first.params.num_returned or len(group))
        self.params_best_of.observe(len(group))
        self.params_max_tokens.observe(first.max_output)

    def refused(self, why: Exception) -> None:
        """Record a request that was refused on arrival."""
        self.num_refused["busy" if isinstance(why, EngineBusyError) else "invalid"] += 1

    def turned(self, seconds: float) -> None:
        """Record a turn of the loop."""
        self.iteration_seconds.observe(seconds)

    def committed(self, step: PlannedStep, result: StepResult, outcomes: StepOutcomes, now: float) -> None:
        """Record a committed step."""
        self.step(outcomes, step.num_prompt_tokens, result.worker_us, now, step.num_run(result))

    def step(
        self,
        outcomes: StepOutcomes,
        num_prompt_tokens: int,
        busy_us: int,
        now: float,
        num_steps: int = 1,
    ) -> None:
        """Record a committed step: its outcomes, its number of prompt tokens and its time in the worker.

        num_steps: that were launched together; what is recorded is of all of them.
        """
        self.step_seconds.observe(busy_us / 1e6 / num_steps, num_steps)
        gaps = Counter(map(TOKEN_GAP, outcomes.sequences))
        longest = max(gaps, default=0.0)
        for sequence, delta in outcomes.others:
            gaps[sequence.token_gap] += len(delta.token_ids)
            longest = max(longest, sequence.token_gap * len(delta.token_ids))
        if longest > 0.0:
            self.stream_gaps.observe(longest)
        self.step_tokens.observe((num_prompt_tokens + sum(gaps.values())) / num_steps, num_steps)
        if gaps.pop(0.0, 0):
            for sequence, delta in outcomes.others:
                if sequence.token_gap == 0.0 and delta.token_ids:
                    self._first_token(self._requests[sequence], now)
        for gap, times in gaps.items():
            self.between_tokens.observe(gap, times)

    def _first_token(self, request: OpenRequest, now: float) -> None:
        """Record the first token of a sequence, which counts if it is the first of its request."""
        if request.first_token_time == 0.0:
            request.first_token_time = now
            self.first_token.observe(now - request.arrival_time)

    def ended(self, sequence: Sequence, reason: str, now: float) -> None:
        """Record the end of a sequence, and that of its request if it was the last one."""
        if sequence.num_output_tokens > 1 and sequence.first_token_time:
            self.per_token.observe((now - sequence.first_token_time) / (sequence.num_output_tokens - 1))
        request = self._requests.pop(sequence)
        request.end(sequence, reason)
        if request.num_open == 0:
            self._request_finished(request, now)

    def _request_finished(self, request: OpenRequest, now: float) -> None:
        """Record the end of a request. Without a token it has no phases."""
        self.num_open -= 1
        self.num_finished[request.reason] += 1
        self.whole.observe(now - request.arrival_time)
        self.prompt_tokens.observe(request.num_prompt_tokens)
        self.output_tokens.observe(request.num_output_tokens)
        if request.first_token_time:
            self.queued.observe(request.scheduled_time - request.arrival_time)
            self.prefill.observe(request.first_token_time - request.scheduled_time)
            self.decode.observe(now - request.first_token_time)
            self.inference.observe(now - request.scheduled_time)


class MeasuredEngine(ReportedEngine, Protocol):
    """The part of the core that metrics are read from."""

    config: EngineConfig
    metrics: Metrics
    grammars: Grammars
    tenants: Accounts
    promises: PrefixPromises


def summary(core: MeasuredEngine) -> tuple[str, dict[str, Any]]:
    """The periodic log line as text, and its fields for the JSON log."""
    scheduler, rates = core.scheduler, core.metrics.rates
    num_running, num_waiting = num_requests(core)
    facts = {
        "message": "stats",
        "prompt_tokens_per_s": rates.prompt,
        "generation_tokens_per_s": rates.output,
        "running": num_running,
        "waiting": num_waiting,
        "kv_cache_usage": scheduler.kv.usage,
        "prefix_cache_hit_rate": hit_rate(scheduler.stats),
        "preemptions": scheduler.stats.num_preemptions,
    }
    line = (
        "Avg prompt throughput: {prompt_tokens_per_s:.1f} tokens/s, "
        "Avg generation throughput: {generation_tokens_per_s:.1f} tokens/s, "
        "Running: {running} reqs, Waiting: {waiting} reqs, "
        "KV cache usage: {kv_cache_usage:.1%}, Prefix cache hit rate: {prefix_cache_hit_rate:.1%}, "
        "Preemptions: {preemptions}"
    )
    if (states := scheduler.kv.group(StateSlots)) is not None:
        facts["state_usage"] = states.usage
        line += ", State slot usage: {state_usage:.1%}"
    if (encoder := scheduler.kv.group(EncoderCache)) is not None:
        facts["encoder_usage"] = encoder.usage
        line += ", Encoder cache usage: {encoder_usage:.1%}"
    if core.config.speculation is not None and rates.gain:
        facts |= {"speculation_tokens_per_step": rates.tokens_per_step, "speculation_gain": rates.gain}
        line += ", speculation: {speculation_tokens_per_step:.1f} tokens a step, {speculation_gain:.1f} x"
    return line.format(**facts), facts


def num_requests(core: MeasuredEngine) -> tuple[int, int]:
    """How many requests have a running sequence, and how many wait with all of theirs."""
    running = len({(sequence.client, sequence.key) for sequence in core.scheduler.running})
    return running, core.metrics.num_open - running


def snapshot(core: MeasuredEngine) -> list[Row]:
    """Every metric as a dict: name, type, documentation, labels, and value or (histograms) buckets, sum, count."""
    labels = {"model_name": core.info.served_model_names[0], "engine": core.metrics.engine_id}
    rows = [*states(core), *counts(core), *distributions(core.metrics), *internals(core), *tenants(core)]
    return [row | {"labels": labels | row.get("labels", {})} for row in rows]


def states(core: MeasuredEngine) -> Iterator[Row]:
    """Gauges: the current state."""
    scheduler, rates = core.scheduler, core.metrics.rates
    usage, hits = scheduler.kv.usage, hit_rate(scheduler.stats)
    num_running, num_waiting = num_requests(core)
    yield gauge("vllm:num_requests_running", "Requests of which a sequence is running.", num_running)
    yield gauge("vllm:num_requests_waiting", "Requests of which no sequence is running.", num_waiting)
    text = (
        "Requests of which no sequence is running: preempted ones with KV blocks in the swap space or on disk "
        "alone, and those that wait while a prefix comes from there or from another core."
    )
    yield gauge("vllm:num_requests_swapped", text, num_swapped(core))
    yield gauge("vllm:kv_cache_usage_perc", "Share of KV cache blocks in use; 1 means 100 percent.", usage)
    text = "Same as kv_cache_usage_perc (older name), on any device."
    yield gauge("vllm:gpu_cache_usage_perc", text, usage)
    text = (
        "Share of swap_space in use; without any, the share of kv_cache_disk that blocks of this model take; 1 "
        "means 100 percent; 0 without both."
    )
    yield gauge("vllm:cpu_cache_usage_perc", text, tier_usage(core))
    text = "Share of prompt tokens found in the prefix cache since the core started, on any device."
    yield gauge("vllm:gpu_prefix_cache_hit_rate", text, hits)
    text = (
        "Share of prompt tokens that came from the swap space or from disk when their request ran first; 0 without "
        "both."
    )
    yield gauge("vllm:cpu_prefix_cache_hit_rate", text, tier_hit_rate(core))
    text = "tokens per second, averaged over the last log_stats_interval."
    yield gauge("vllm:avg_prompt_throughput_toks_per_s", f"Prompt {text}", rates.prompt)
    yield gauge("vllm:avg_generation_throughput_toks_per_s", f"Output {text}", rates.output)
    text, drafts = "Share of the verified draft tokens that were right.", scheduler.speculation.stats
    yield gauge("vllm:spec_decode_draft_acceptance_rate", text, drafts.acceptance_rate)
    text = "Share of the tokens that rows with drafts could have given that they gave."
    yield gauge("vllm:spec_decode_efficiency", text, drafts.efficiency)
    text = "Always 1; the labels hold the settings of the KV cache."
    yield gauge("vllm:cache_config_info", text, 1, cache(core))


def counts(core: MeasuredEngine) -> Iterator[Row]:
    """Counters since the core started."""
    stats = core.scheduler.stats
    text = "Number of times a running sequence was put back in the queue, to be resumed later."
    yield counter("vllm:num_preemptions_total", text, stats.num_preemptions)
    text = "Prompt tokens computed, not counting those found in the prefix cache."
    yield counter("vllm:prompt_tokens_total", text, stats.num_prompt_tokens)
    yield counter("vllm:generation_tokens_total", "Output tokens generated.", stats.num_output_tokens)
    text = "Prompt tokens looked up in the prefix cache."
    yield counter("vllm:prefix_cache_queries_total", text, stats.num_prefix_queries)
    text = "Prompt tokens found in the prefix cache."
    yield counter("vllm:prefix_cache_hits_total", text, stats.num_prefix_hits)
    drafts = core.scheduler.speculation.stats
    yield counter("vllm:spec_decode_num_drafts_total", "Drafts verified.", drafts.num_rows)
    text = "Draft tokens verified."
    yield counter("vllm:spec_decode_num_draft_tokens_total", text, drafts.num_drafts)
    text = "Draft tokens that were right."
    yield counter("vllm:spec_decode_num_accepted_tokens_total", text, drafts.num_accepted)
    text = "Tokens of steps that verified drafts: those that were right, and the one behind each draft."
    yield counter("vllm:spec_decode_num_emitted_tokens_total", text, drafts.num_emitted)
    text = "Draft tokens that were right, by position in their draft."
    for place, number in enumerate(drafts.accepted_at):
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        yield counter(name, text, number, {"position": str(place)})
    text = (
        "Finished requests by reason: stop (a stop string or token), length, abort, error. If the n sequences of a "
        "request ended for different reasons, the last of these in this order counts."
    )
    for reason, number in core.metrics.num_finished.items():
        yield counter("vllm:request_success_total", text, number, {"finished_reason": reason})


def distributions(metrics: Metrics) -> Iterator[Row]:
    """Histograms. A request for n sequences adds one value, but to the times between tokens."""
    text = "Time from a request's arrival to its first token."
    yield histogram("vllm:time_to_first_token_seconds", text, metrics.first_token)
    text = "Time between two consecutive tokens of a sequence."
    yield histogram("vllm:inter_token_latency_seconds", text, metrics.between_tokens)
    text = "Same as inter_token_latency_seconds (older name)."
    yield histogram("vllm:time_per_output_token_seconds", text, metrics.between_tokens)
    text = "Mean time per token of each finished sequence, not counting the first token."
    yield histogram("vllm:request_time_per_output_token_seconds", text, metrics.per_token)
    text = "Time from a request's arrival to the end of its last sequence, also if it was aborted or failed."
    yield histogram("vllm:e2e_request_latency_seconds", text, metrics.whole)
    text = "Time from a request's arrival to its first step."
    yield histogram("vllm:request_queue_time_seconds", text, metrics.queued)
    text = "Same as request_queue_time_seconds (older name)."
    yield histogram("vllm:time_in_queue_requests", text, metrics.queued)
    text = "Time from a request's first step to its end."
    yield histogram("vllm:request_inference_time_seconds", text, metrics.inference)
    text = "Time from a request's first step to its first token."
    yield histogram("vllm:request_prefill_time_seconds", text, metrics.prefill)
    text = "Time from a request's first token to its end."
    yield histogram("vllm:request_decode_time_seconds", text, metrics.decode)
    text = "Prompt tokens of each finished request."
    yield histogram("vllm:request_prompt_tokens", text, metrics.prompt_tokens)
    text = "Output tokens of each finished request, those of its n sequences together."
    yield histogram("vllm:request_generation_tokens", text, metrics.output_tokens)
    text = "Sequences that each request returns (n)."
    yield histogram("vllm:request_params_n", text, metrics.params_n)
    text = "Sequences generated for each request, of which the n most likely are returned (best_of)."
    yield histogram("vllm:request_params_best_of", text, metrics.params_best_of)
    text = "Maximum output tokens of each request: max_tokens, or less if max_model_len leaves less."
    yield histogram("vllm:request_params_max_tokens", text, metrics.params_max_tokens)
    text = "Tokens of each step: prompt tokens computed and output tokens generated."
    yield histogram("vllm:iteration_tokens_total", text, metrics.step_tokens)


def internals(core: MeasuredEngine) -> Iterator[Row]:
    """Metrics that only this engine has."""
    metrics, clients = core.metrics, core.clients.attached.values()
    yield gauge("pagewire:frontends", "Number of attached frontends.", len(clients))
    text, live = "Unfinished sequences by frontend and phase.", phases(core)
    for client in clients:
        for phase, number in live[client.number].items():
            labels = {
                "frontend": client.name,
                "pid": str(client.pid),
                "number": str(client.number),
                "phase": phase,
            }
            yield gauge("pagewire:frontend_requests", text, number, labels)
    text = "1 while the engine is paused: new requests wait until it is resumed."
    yield gauge("pagewire:paused", text, int(core.lobby.held))
    text = "1 while the engine sleeps: the worker has released its memory."
    yield gauge("pagewire:asleep", text, int(bool(core.sleep.asleep)))
    text = "0 while the engine is awake; 1: its workers have given memory back; 2: they have ended, or start again."
    yield gauge("pagewire:sleep_level", text, core.sleep.level)
    text = "Requests refused on arrival, by reason: busy (queue full, or shutting down), invalid."
    for reason, number in metrics.num_refused.items():
        yield counter("pagewire:requests_refused_total", text, number, {"reason": reason})
    if core.info.pooling is not None:
        text = "Requests to pool, by task."
        for task in core.info.pooling.tasks:
            yield counter("pagewire:pooling_requests_total", text, metrics.num_pooling[task], {"task": task})
    yield from adapters(core)
    yield from tier(core)
    yield from retention(core.promises)
    if (states := core.scheduler.kv.group(StateSlots)) is not None:
        yield from state_slots(states, core.scheduler.stats)
    yield from media(core)
    grammars = core.grammars
    yield gauge("pagewire:grammars_cached", "Compiled grammars in the cache.", len(grammars))
    text = "Grammars looked up in the cache, one for each request with structured output."
    yield counter("pagewire:grammar_queries_total", text, grammars.num_queries)
    text = "Grammars found in the cache."
    yield counter("pagewire:grammar_hits_total", text, grammars.num_hits)
    text = "Time each request with structured output waited for its grammar to be compiled."
    yield histogram("pagewire:grammar_time_seconds", text, metrics.grammar)
    text = "Worker processes started to replace a lost one."
    yield counter("pagewire:worker_restarts_total", text, num_restarts(core))
    text = "Starts of the workers because the engine was woken (sleep level 2)."
    yield counter("pagewire:worker_wakes_total", text, core.supervisor.num_wakes)
    text = "1 while the workers run, asleep or not; 0 while one of them starts, and at sleep level 2."
    yield gauge("pagewire:workers_ready", text, int(core.worker.ready is not None))
    text = "Time the worker spent on computing steps."
    yield counter("pagewire:worker_busy_seconds_total", text, core.steps.busy_us / 1e6)
    text = "Time the worker waited for its next step while requests were unfinished."
    yield counter("pagewire:worker_idle_seconds_total", text, core.steps.idle_us / 1e6)
    text = "Steps by what ran them in the worker: one compiled call, a recorded graph, or operation by operation."
    for way in Way:
        yield counter("pagewire:worker_steps_total", text, core.steps.by_way[way], {"way": way.value})
    text = "Duration of each step in the worker."
    yield histogram("pagewire:worker_step_seconds", text, metrics.step_seconds)
    text = (
        "Longest time since its token before of the sequences that a step gave tokens: the gap that the slowest "
        "stream has seen, once for each step."
    )
    yield histogram("pagewire:stream_gap_seconds", text, metrics.stream_gaps)
    text = "Steps that took longer than max_step_ms while a sequence waited for its next token."
    yield counter("pagewire:steps_over_limit_total", text, core.scheduler.limit.num_over)
    text = (
        "Duration of one iteration of the core loop; a message that arrives meanwhile waits up to this long."
    )
    yield histogram("pagewire:core_turn_seconds", text, metrics.iteration_seconds)


def retention(promises: PrefixPromises) -> Iterator[Row]:
    """Prefixes that were promised to stay cached."""
    text = "Promises that a prefix stays cached, which have not ended."
    yield gauge("pagewire:retained_prefixes", text, promises.num_promises)
    text = "KV blocks that promises keep, and those that they may keep at most."
    yield gauge("pagewire:retained_blocks", text, promises.num_blocks, {"kind": "kept"})
    yield gauge("pagewire:retained_blocks", text, promises.limits.num_blocks, {"kind": "limit"})
    text = "Wishes that a prefix stays cached which were refused, or granted in part, for want of room."
    yield counter("pagewire:retentions_refused_total", text, promises.num_refused)


def state_slots(slots: StateSlots, stats: SchedulerStats) -> Iterator[Row]:
    """The slots with states of recurrent layers, and what becomes of checkpoints."""
    text, pool = "State slots by use: running sequences, checkpoints of prefixes, free.", slots.pool
    num_checkpoints = sum(block.num_refs == 0 for block in pool.named.values())
    uses = {"running": pool.num_used, "checkpoint": num_checkpoints, "free": pool.num_free - num_checkpoints}
    for use, number in uses.items():
        yield gauge("pagewire:state_slots", text, number, {"use": use})
    text = "Checkpoints of states by event: made, hit (a sequence went on from it), evicted (for its slot)."
    events = {"made": slots.num_made, "hit": stats.num_resumed, "evicted": pool.num_evictions}
    for event, number in events.items():
        yield counter("pagewire:state_checkpoints_total", text, number, {"event": event})


def media(core: MeasuredEngine) -> Iterator[Row]:
    """What is kept of pictures and sound; nothing if none are taken."""
    encoder, store = core.scheduler.kv.group(EncoderCache), core.media
    if encoder is None or store is None:
        return
    text = "Fraction of the encoder's cache that embeddings of pictures and sounds take, 0 to 1."
    yield gauge("pagewire:encoder_cache_usage", text, encoder.usage)
    text = "Pictures and sounds that prompts reached, each time that their embeddings were needed."
    yield counter("pagewire:encoder_cache_queries_total", text, encoder.num_queries)
    text = "Pictures and sounds whose embeddings were there, so that they were not encoded."
    yield counter("pagewire:encoder_cache_hits_total", text, encoder.num_hits)
    text = "Slices in which pictures and sounds were encoded beside streams; a pass in one piece is none."
    yield counter("pagewire:encoder_slices_total", text, encoder.num_slices)
    text = "Memory of the features that the model's processor has made of pictures and sounds, in bytes."
    yield gauge("pagewire:media_features_bytes", text, store.num_bytes)
    text = "Pictures and sounds of requests."
    yield counter("pagewire:media_queries_total", text, store.num_queries)
    text = "Pictures and sounds whose features were there, so that they were not processed."
    yield counter("pagewire:media_hits_total", text, store.num_hits)


def tier(core: MeasuredEngine) -> Iterator[Row]:
    """What is kept of KV blocks beside the KV cache, and what goes between cores; nothing where there are none."""
    if core.tier is None:
        return
    if core.tier.swaps:
        yield from blocks_in_swap_space(core.tier)
    if core.tier.keeps:
        yield from blocks_on_disk(core.tier)
    yield from blocks_of_peers(core.tier)


def blocks_in_swap_space(tier: ColdTier) -> Iterator[Row]:
    """What is kept of KV blocks in host memory, and what becomes of it."""
    report, reads = tier.report, tier.reads
    text = "KV blocks and states in the swap space (swap_space)."
    yield gauge("pagewire:swap_blocks", text, len(reads.swap))
    text = (
        "KV blocks and states by what became of them, since the core's start: out (copied to the swap space), back "
        "(copied from there), hit (blocks of which a sequence found the content after that)."
    )
    events = {"out": reads.swap.num_out, "back": reads.swap.num_back, "hit": reads.num_swap_hits}
    for event, number in events.items():
        yield counter("pagewire:swap_blocks_total", text, number, {"event": event})
    text = "Bytes that were copied from the swap space, and were timed, since the worker's start."
    yield counter("pagewire:swap_bytes_total", text, report.bytes_swapped)
    text = "Time that copying from the swap space took."
    yield counter("pagewire:swap_seconds_total", text, report.swap_seconds)


def blocks_on_disk(tier: ColdTier) -> Iterator[Row]:
    """What is kept of KV blocks on disk, and what becomes of it."""
    report, reads = tier.report, tier.reads
    yield gauge(
        "pagewire:kv_tier_blocks", "KV blocks of this model on disk (kv_cache_dir).", len(reads.names)
    )
    yield gauge("pagewire:kv_tier_bytes", "Bytes of the KV blocks of this model on disk.", report.num_bytes)
    yield gauge("pagewire:kv_tier_reads", "Prefixes that are being read from disk.", reads.num_reads)
    text = (
        "KV blocks by what became of them, since the worker's start: written to disk, dropped (as the disk was too "
        "slow, full or failed), read, unreadable (damaged or gone, so that they were computed), hit (found by a "
        "prompt after they were read)."
    )
    events = {
        "written": report.num_written,
        "dropped": report.num_dropped,
        "read": report.num_read,
        "unreadable": report.num_unreadable,
        "hit": reads.num_hits,
    }
    for event, number in events.items():
        yield counter("pagewire:kv_tier_blocks_total", text, number, {"event": event})
    text = "Bytes of KV blocks written to disk, and read, since the worker's start."
    for event, number in {"written": report.bytes_written, "read": report.bytes_read}.items():
        yield counter("pagewire:kv_tier_bytes_total", text, number, {"event": event})
    yield counter(
        "pagewire:kv_tier_read_seconds_total",
        "Time that reading KV blocks from disk took.",
        report.read_seconds,
    )


def blocks_of_peers(tier: ColdTier) -> Iterator[Row]:
    """What comes from other cores, and goes to them; nothing without any."""
    report, reads, peers, lending = tier.report, tier.reads, tier.peers, tier.lending
    if peers is None or lending is None:
        return
    text = "Other cores that can be asked for KV blocks (kv_peers)."
    yield gauge("pagewire:kv_peers", text, len(reads.peers.reachable))
    text = "Prefixes by what became of asking other cores for them: asked, expired (not answered in time)."
    for event, number in {"asked": peers.num_questions, "expired": peers.num_expired}.items():
        yield counter("pagewire:kv_peer_questions_total", text, number, {"event": event})
    text = (
        "KV blocks by what became of them: fetched (from another core), damaged (not as they were sent, so that "
        "they were computed), hit (found by a prompt after they were fetched), lent (to another core)."
    )
    events = {
        "fetched": report.num_fetched,
        "damaged": report.num_damaged,
        "hit": reads.num_peer_hits,
        "lent": lending.num_lent,
    }
    for event, number in events.items():
        yield counter("pagewire:kv_peer_blocks_total", text, number, {"event": event})
    text = "Bytes of KV blocks fetched from other cores, and lent to them."
    for event, number in {"fetched": report.bytes_fetched, "lent": lending.bytes_lent}.items():
        yield counter("pagewire:kv_peer_bytes_total", text, number, {"event": event})
    text = "Time that fetching KV blocks from other cores took."
    yield counter("pagewire:kv_peer_fetch_seconds_total", text, peers.fetch_seconds)


def adapters(core: MeasuredEngine) -> Iterator[Row]:
    """What the engine's adapters do; nothing if it serves none."""
    table = core.adapters
    if table is None:
        return
    text = "Time of this report; the labels name the adapters of running and of waiting requests."
    labels = {
        "running_lora_adapters": ",".join(table.queue.names_running()[:MAX_ADAPTER_NAMES]),
        "waiting_lora_adapters": ",".join(table.queue.names_waiting()[:MAX_ADAPTER_NAMES]),
        "max_lora": str(table.limits.max_active),
    }
    yield gauge("vllm:lora_requests_info", text, time.time(), labels)
    yield gauge("pagewire:adapters_resident", "LoRA adapters in memory.", len(table.memory.resident))
    yield gauge("pagewire:adapters_registered", "LoRA adapters that were added.", len(table.registry.named))
    yield gauge("pagewire:adapter_bytes", "Bytes of the LoRA adapters in memory.", table.memory.num_bytes)
    yield counter(
        "pagewire:adapter_loads_total", "LoRA adapters read by the workers.", table.memory.num_loads
    )


def tenants(core: MeasuredEngine) -> Iterator[Row]:
    """What each named tenant has and was given; beyond the `MAX_TENANTS` most served, all as "(others)"."""
    named = [tenant for tenant in core.tenants if isinstance(tenant.name, str)]
    named.sort(key=lambda tenant: tenant.served, reverse=True)
    parts = [(str(tenant.name), [tenant]) for tenant in named[:MAX_TENANTS]]
    if others := named[MAX_TENANTS:]:
        parts.append(("(others)", others))
    text, tokens = "Scheduled sequences by tenant and phase.", "Tokens computed by tenant and kind."
    for name, members in parts:
        phases = {
            "waiting": sum(tenant.num_waiting for tenant in members),
            "running": sum(tenant.num_running for tenant in members),
        }
        for phase, number in phases.items():
            yield gauge("pagewire:tenant_sequences", text, number, {"tenant": name, "phase": phase})
        number = sum(tenant.num_requests for tenant in members)
        yield counter("pagewire:tenant_requests_total", "Requests by tenant.", number, {"tenant": name})
        kinds = {
            "prompt": sum(tenant.num_prompt_tokens for tenant in members),
            "output": sum(tenant.num_output_tokens for tenant in members),
        }
        for kind, number in kinds.items():
            yield counter("pagewire:tenant_tokens_total", tokens, number, {"tenant": name, "kind": kind})


def cache(core: MeasuredEngine) -> dict[str, str]:
    """The settings of the KV cache as metric labels."""
    args, info = core.config.args, core.info
    settings = {
        "block_size": info.block_size,
        "num_gpu_blocks": info.num_blocks,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "enable_prefix_caching": args.enable_prefix_caching,
        "cache_dtype": args.resolved_kv_dtype(info.dtype),
        "device": info.device,
    }
    return {name: str(value) for name, value in settings.items()}


def hit_rate(stats: SchedulerStats) -> float:
    """Fraction of the tokens looked up in the prefix cache that were cached, 0 to 1."""
    return stats.num_prefix_hits / max(1, stats.num_prefix_queries)


def num_swapped(core: MeasuredEngine) -> int:
    """How many requests have no sequence that runs, and one that a cold tier has a part of, see `states`."""
    if core.tier is None:
        return 0
    reads, scheduler = core.tier.reads, core.scheduler
    running = {(sequence.client, sequence.key) for sequence in core.scheduler.running}
    held = [sequence for sequence in reads.held if not sequence.finished]
    away = [sequence for sequence in scheduler.waiting if reads.is_away(sequence, scheduler.kv)]
    return len({(sequence.client, sequence.key) for sequence in held + away} - running)


def tier_usage(core: MeasuredEngine) -> float:
    """Fraction of the swap space that is used, or without any of the room on disk, 0 to 1; 0 without both."""
    if core.tier is None:
        return 0.0
    if core.tier.swaps:
        return core.tier.reads.swap.usage
    if core.config.tier is None or not core.config.tier.num_bytes:
        return 0.0
    return core.tier.report.num_bytes / core.config.tier.num_bytes


def tier_hit_rate(core: MeasuredEngine) -> float:
    """Fraction of the tokens looked up in the prefix cache that were there as they came from swap space or disk."""
    if core.tier is None:
        return 0.0
    num_tokens = core.tier.reads.num_first_hits * core.scheduler.config.block_size
    # Several may have waited for a read, and a read may end after its sequence was aborted.
    return min(1.0, num_tokens / max(1, core.scheduler.stats.num_prefix_queries))


def one_two_five(limit: int) -> list[float]:
    """Bucket bounds 1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds, scale = [], 1
    while scale <= limit:
        bounds += [float(scale * m) for m in (1, 2, 5) if scale * m <= limit]
        scale *= 10
    return bounds


def gauge(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Row:
    """A row of `snapshot` for a current value."""
    return {"name": name, "type": "gauge", "documentation": text, "labels": labels or {}, "value": value}


def counter(name: str, text: str, value: float, labels: dict[str, str] | None = None) -> Row:
    """A row of `snapshot` for a count that only grows."""
    return {"name": name, "type": "counter", "documentation": text, "labels": labels or {}, "value": value}


def histogram(name: str, text: str, distribution: Distribution) -> Row:
    """A row of `snapshot` for a histogram."""
    return {"name": name, "type": "histogram", "documentation": text, **distribution.values()}
