"""Faults planted in the sampling kernels: comparing with the CPU sampler must reveal every fault."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pagewire.kernels.cuda.sampling import SOURCE, variant
from pagewire.kernels.cuda.source import Variant
from pagewire.workers.device.cuda_sampler import CudaTokenSampler
from pagewire.workers.sample.masks import TokenMasks
from pagewire.workers.sample.sampler import SamplingSlot, sample
from pagewire.workers.sample.typical import Candidate, TypicalAcceptance
from tests.kernels.cuda.emulate import ORDERS, Edit, EmulatedLauncher, EmulationError
from tests.kernels.cuda.emulate.library import load
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice
from tests.kernels.cuda.test_sampling import make_slot, masks_of

VOCAB = 4500
Batch = tuple[torch.Tensor, list[SamplingSlot], TokenMasks | None]

# ---------------------------------------------------------------- batches


def noise(rows: int, vocab_size: int = VOCAB) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn(rows, vocab_size) * 2


def greedy() -> Batch:
    """Ties, zeros of both signs, every edit, masks, a forbidden NaN, infinities."""
    logits = noise(9)
    logits[0] = 0.0
    logits[0, 5] = -0.0
    logits[0, :5] = -1.0
    logits[1, 200], logits[2, -1] = math.nan, math.inf
    for row, best in ((3, 10), (4, 20), (5, 4200), (6, 30), (7, 4300)):
        logits[row, best] = 9.0
    logits[3, 40] = 8.0
    logits[4, 20], logits[4, 50] = 9.0, 8.5
    logits[8] = -logits[8].abs() - 1
    logits[8, 60] = -0.5
    params = [
        {},
        {"bad_words_token_ids": [[200]]},
        {},
        {"repetition_penalty": 1.5, "prompt": [10]},
        {"presence_penalty": 2.0, "repetition_penalty": 1.01, "prompt": [20]},
        {"frequency_penalty": 1.5, "output": [4200] * 7},
        {"allowed_token_ids": [30, 4300, 77], "logit_bias": {77: 50.0}},
        {"allowed_token_ids": [4300, 4301]},
        {"repetition_penalty": 4.0, "prompt": [60]},
    ]
    slots = [make_slot(VOCAB, temperature=0, **row) for row in params]
    allowed = [None] * 6 + [[30, 4301], [4301, 4200], None]
    return logits, slots, masks_of(allowed, VOCAB)


def random() -> Batch:
    """Plain draws, and min_p."""
    logits = noise(12)
    params = [{}, {"min_p": 0.05}, {"temperature": 2.5}, {"temperature": 0.3}]
    slots = [make_slot(VOCAB, seed=i, **params[i % 4]) for i in range(12)]
    return logits, slots, None


def truncated() -> Batch:
    logits = noise(12)
    logits[6:] = logits[6:].bfloat16().float()  # ties
    params = [{"top_k": 300}, {"top_p": 0.6}, {"top_k": 700, "top_p": 0.8, "min_p": 0.001}]
    slots = [make_slot(VOCAB, seed=i, temperature=1.5, **params[i % 3]) for i in range(12)]
    return logits, slots, None


def ends_apart() -> Batch:
    """top_k ends among ties of large or small total probability, so top_p may end in many bins."""
    logits = torch.full((8, VOCAB), -math.inf)
    logits[:, 7], logits[:, 100:110], logits[:, 1000:2000] = 2.0, torch.linspace(1.95, 1.4, 10), 1.0
    slots = [make_slot(VOCAB, seed=i, top_k=500, top_p=0.005 + 0.005 * i) for i in range(8)]
    return logits, slots, None


def same_bin() -> Batch:
    """top_k and top_p end among the same ties: fewer than the list holds, and more."""
    logits = torch.zeros(10, VOCAB)
    logits[:5, 2000:] = -math.inf
    logits[5:, 4096:] = -1e-4
    slots = [make_slot(VOCAB, seed=i, top_k=50, top_p=0.9) for i in range(10)]
    return logits, slots, None


def typical() -> Batch:
    """The second of all tokens, in the first or the last slice, for factors of the entropy on both sides of it."""
    alphas = [0.5 * 2**i for i in range(11)]
    logits = noise(4 * len(alphas))
    logits[:, 4200] = logits[:, 17] = 6.0
    logits[:, 18] = 9.0
    logits[2::4] = torch.where(logits[2::4] < 6, 3.0, logits[2::4])  # all of the others are in one list
    kinds = [{}, {"top_k": 300}, {"top_k": 50}, {"top_p": 0.98}]
    slots = []
    for i, alpha in enumerate(alphas):
        for params in kinds:
            slot = make_slot(VOCAB, seed=i, temperature=1.5, **params)
            slots.append(slot.ahead([], Candidate(17 if i % 2 else 4200, TypicalAcceptance(1.0, alpha))))
    return logits, slots, None


def likely() -> Batch:
    """Drafts at the threshold, and drafts that truncation, min_p, edits or the vocabulary leave out."""
    logits = noise(8)
    logits[:, 20:22] = 9.0
    logits[:3] = torch.where(torch.arange(VOCAB) < 4, 0.0, -math.inf)  # 4 tokens with a quarter each
    anything, quarter = TypicalAcceptance(0.0, 0.0), TypicalAcceptance(0.25, 1e6)
    most = TypicalAcceptance(0.26, 1e6)
    rows: list[tuple[int, TypicalAcceptance, dict[str, Any]]] = [
        (1, quarter, {}),
        (2, most, {}),
        (5, anything, {}),
        (4400, anything, {"top_k": 2}),
        (4400, anything, {"min_p": 0.9}),
        (4400, anything, {"bad_words_token_ids": [[4400]]}),
        (VOCAB, anything, {}),
        (4400, anything, {}),
    ]
    slots = [
        make_slot(VOCAB, seed=i, **params).ahead([], Candidate(draft, rule))
        for i, (draft, rule, params) in enumerate(rows)
    ]
    return logits, slots, None


def logprobs() -> Batch:
    logits = noise(6).bfloat16().float()
    logits[5] = 0.0
    return logits, [make_slot(VOCAB, temperature=0, logprobs=k) for k in (0, 1, 5, 20, 20, 20)], None


@dataclass
class FaultyLauncher(EmulatedLauncher):
    """An emulated device with faults in one kernel only."""

    kernel: str = ""

    def launch(self, variant: Variant, *arguments: Any) -> None:
        """As `EmulatedLauncher`."""
        edits = self.edits if variant.name.startswith(self.kernel) else ()
        EmulatedLauncher(self.order, edits).launch(variant, *arguments)


def differs(make: Callable[[], Batch], kernel: str = "", *edits: Edit) -> bool:
    """True if the output in any order of threads is not the CPU sampler's. Two launches use the same memory."""
    logits, slots, masks = make()
    expected = sample(logits, slots, masks)
    for order in ORDERS:
        launcher = FaultyLauncher(order, edits, kernel=kernel)
        sampler = CudaTokenSampler(EmulatedCudaDevice(launcher), len(slots), logits.shape[1], 20)
        try:
            for _ in range(2):
                if sampler.launch(logits, slots, masks).finish() != expected:
                    return True
        except EmulationError:
            return True
    return False


# ---------------------------------------------------------------- faults

COMMON, LOGPROBS = "vocabulary.cuh", "sampling_logprobs.cu"

# The kernel, the batch that reveals the fault, the file, the text, and its replacement.
FAULTS: list[tuple[str, Callable[[], Batch], str, str, str]] = [
    # the largest logit, edits
    ("find_peaks", greedy, COMMON, "if (bits == 0x80000000u) bits = 0;", ""),
    ("find_peaks", greedy, COMMON, "u64(~rising(x)) << 32 | id", "u64(~rising(x)) << 32 | u32(~id)"),
    ("find_peaks", greedy, COMMON, "    __syncthreads();  // the last reduction has been read\n", ""),
    (
        "find_peaks",
        greedy,
        COMMON,
        "scratch.warps[threadIdx.x / 32] = value;\n    __syncthreads();",
        "scratch.warps[threadIdx.x / 32] = value;",
    ),
    (
        "find_peaks",
        greedy,
        COMMON,
        "atomicInc(ticket, count - 1) == count - 1",
        "atomicInc(ticket, count - 1) == 0",
    ),
    (
        "find_peaks",
        greedy,
        SOURCE,
        "const u32 key = nan ? ~0u : rising(x)",
        "const u32 key = nan ? 0u : rising(x)",
    ),
    ("find_peaks", greedy, SOURCE, "        __syncthreads();  // the raw logits have been read\n", ""),
    (
        "find_peaks",
        greedy,
        SOURCE,
        "masked < rising(__uint_as_float(INFINITE))",
        "masked <= rising(__uint_as_float(INFINITE))",
    ),
    ("find_peaks", greedy, SOURCE, "if (times > 0.0f) x", "x"),
    (
        "find_peaks",
        greedy,
        SOURCE,
        "const bool negative = rising(x) < rising(0.0f);",
        "const bool negative = false;",
    ),
    ("find_peaks", greedy, SOURCE, "multiply_exact(row.frequency, times)", "row.frequency"),
    ("find_peaks", greedy, SOURCE, "row.mask * call.mask_stride + first / 32", "row.mask * call.mask_stride"),
    ("find_peaks", greedy, SOURCE, "if (!mask || mask[column / 32] & bit) ", ""),
    (
        "find_peaks",
        greedy,
        SOURCE,
        "if (!(slice.allowed[i / 32] >> i % 32 & 1))",
        "if (!(slice.allowed[i / 32] >> (i + 1) % 32 & 1))",
    ),
    ("find_peaks", greedy, SOURCE, "u32(ids[i]) - u32(first)", "u32(ids[i])"),
    # masses, draws
    ("add_masses", random, COMMON, "if (!(depth < 32.0f)) return 0;", "if (!(depth < 4.0f)) return 0;"),
    (
        "add_masses",
        random,
        COMMON,
        "    if (threadIdx.x % 32 == 31) scratch",
        "    if (threadIdx.x % 32 == 30) scratch",
    ),
    (
        "add_masses",
        random,
        COMMON,
        "if (warp < threadIdx.x / 32) before",
        "if (warp <= threadIdx.x / 32) before",
    ),
    ("add_masses", random, COMMON, "(old + low < old)", "0"),
    ("add_masses", random, COMMON, "need -= scratch.before;", ""),
    (
        "add_masses",
        random,
        COMMON,
        "        if (range.digits) {\n            __syncthreads();\n",
        "        if (range.digits) {\n",
    ),
    ("add_masses", random, COMMON, "span > 8 ? span - 8 : 0", "span > 8 ? span - 9 : 0"),
    ("add_masses", random, SOURCE, "fraction << 11", "fraction << 10"),
    ("add_masses", random, SOURCE, "k0 += 0x9E3779B9u", "k0 += 0x9E3779B1u"),
    (
        "add_masses",
        random,
        SOURCE,
        "if (mass < row.least_mass) continue;\n        sum += mass;\n        if (weighs)",
        "sum += mass;\n        if (weighs)",
    ),
    ("add_masses", random, SOURCE, "need = target - scratch.before + 1", "need = target + 1"),
    # truncation
    ("add_masses", truncated, COMMON, "need <= reached + sum) {", "need < reached) {"),
    (
        "add_masses",
        truncated,
        COMMON,
        "if (from[bin]) atomicAdd(to + bin, from[bin]);",
        "to[bin] = from[bin];",
    ),
    ("add_masses", truncated, SOURCE, "k_need = need - scratch.before;", "k_need = need;"),
    ("add_masses", truncated, SOURCE, "        if (by_count) clear_bins(counts);\n    } else", "    } else"),
    (
        "choose_tokens",
        truncated,
        SOURCE,
        "    if (row.top_p < 1.0) clear_bins(call.bin_masses",
        "    if (false) clear_bins(call.bin_masses",
    ),
    ("choose_tokens", truncated, SOURCE, "    if (threadIdx.x == 0) state.num_candidates = 0;\n", ""),
    ("choose_tokens", truncated, SOURCE, "if (bin < ends.first_bin) {", "if (bin <= ends.first_bin) {"),
    (
        "choose_tokens",
        truncated,
        SOURCE,
        "if (at == state.k_bin && order <= limit) kept += mass;",
        "if (at == state.k_bin) kept += mass;",
    ),
    ("add_masses", ends_apart, SOURCE, "if (k_bin < NUM_BINS) most += __ldcg(masses + k_bin);", ""),
    ("choose_tokens", ends_apart, SOURCE, "bin == state.k_bin || ", ""),
    (
        "choose_tokens",
        same_bin,
        SOURCE,
        "if (at == state.k_bin && order <= limit) kept",
        "if (at == state.k_bin) kept",
    ),
    ("choose_tokens", same_bin, SOURCE, "state.num_candidates <= CANDIDATES;", "true;"),
    (
        "choose_tokens",
        same_bin,
        SOURCE,
        "            __syncthreads();  // the last slice has been read\n",
        "",
    ),
    ("choose_tokens", same_bin, SOURCE, "by_mass ? mass : 1", "1"),
    # typical acceptance
    ("add_masses", typical, SOURCE, "u64(multiply_exact(depth, float(mass)))", "mass"),
    ("add_masses", typical, SOURCE, "\n        if (weighs) depths += weighted(depth, mass);", ""),
    ("choose_tokens", typical, SOURCE, "            if (weighs) depths += weighted(depth, mass);\n", ""),
    (
        "choose_tokens",
        typical,
        SOURCE,
        "if (weighs) depths += weighted(depth_below",
        "if (0) depths += weighted(depth_below",
    ),
    (
        "add_masses",
        typical,
        SOURCE,
        "column = u32(row.draft) - blockIdx.x * SLICE",
        "column = u32(row.draft)",
    ),
    (
        "choose_tokens",
        typical,
        SOURCE,
        "multiply_exact(row.posterior_alpha, double(at_mean))",
        "row.posterior_alpha",
    ),
    ("add_masses", typical, SOURCE, "divide_exact(float(depths), float(total))", "float(depths)"),
    (
        "add_masses",
        likely,
        SOURCE,
        ">= multiply_exact(row.posterior_threshold",
        "> multiply_exact(row.posterior_threshold",
    ),
    (
        "add_masses",
        likely,
        SOURCE,
        "multiply_exact(row.posterior_threshold, double(total))",
        "row.posterior_threshold",
    ),
    ("choose_tokens", likely, SOURCE, " || order_of(x, row.draft) > limit", ""),
    ("add_masses", likely, SOURCE, "mass < row.least_mass || order_of", "order_of"),
    ("add_masses", likely, SOURCE, "u32(row.draft) < u32(call.vocab_size)", "row.draft >= 0"),
    ("add_masses", likely, SOURCE, "if (threadIdx.x == 0) call.token_ids[blockIdx.y] = row.draft;", ""),
    # log probabilities
    ("weigh_tokens", logprobs, COMMON, "multiply_exact(n, -2.12194440e-4f)", "multiply_exact(n, -2.2e-4f)"),
    (
        "weigh_tokens",
        logprobs,
        LOGPROBS,
        "rising(shared.x[i]) > rising(chosen)",
        "rising(shared.x[i]) >= rising(chosen)",
    ),
    ("take_most_likely", logprobs, LOGPROBS, "shared.taken[other] < order", "shared.taken[other] > order"),
    ("weigh_tokens", logprobs, LOGPROBS, "        clear_bins(counts);\n", ""),
    ("take_most_likely", logprobs, LOGPROBS, "<= k_bin) visit(order)", "< k_bin) visit(order)"),
    (
        "take_most_likely",
        logprobs,
        LOGPROBS,
        "if (order <= limit) shared.taken",
        "if (order < limit) shared.taken",
    ),
    (
        "take_most_likely",
        logprobs,
        LOGPROBS,
        "    __syncthreads();\n#pragma unroll 1\n    for (int i = threadIdx.x; i < most_likely",
        "    for (int i = threadIdx.x; i < most_likely",
    ),
]


@pytest.mark.parametrize("make", sorted({fault[1] for fault in FAULTS}, key=lambda make: make.__name__))
def test_without_faults_the_output_is_right(make: Callable[[], Batch]) -> None:
    assert not differs(make)


@pytest.mark.planted_faults
def test_every_planted_fault_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the count."""
    faults = [(kernel, make, Edit(*edit)) for kernel, make, *edit in FAULTS]
    with ThreadPoolExecutor(
        len(os.sched_getaffinity(0))
    ) as pool:  # the compiler runs in processes of its own
        list(pool.map(lambda fault: load(variant(fault[0], torch.float32), (fault[2],)), faults))
    missed = [edit for kernel, make, edit in faults if not differs(make, kernel, edit)]
    with capsys.disabled():
        print(f"\nsampling kernels: {len(faults) - len(missed)} of {len(faults)} planted faults caught")
    assert missed == []
