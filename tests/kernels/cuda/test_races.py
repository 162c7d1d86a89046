"""No threads access the same shared memory without a barrier between them, in whichever order they are emulated.

For changes of the kernels: with the compiler's trace of every access, they take several times as long.
"""

from __future__ import annotations

import pytest
import torch

from pagewire.kernels.cuda import linear
from pagewire.kernels.cuda.kernels import CudaKernels
from pagewire.kernels.cuda.launch import HOPPER
from pagewire.kernels.cuda.trial import Trial
from pagewire.kernels.cuda.trials import trials
from pagewire.kernels.cuda.variants import Launches
from pagewire.workers.device.first_run import why_sampling_is_wrong
from tests.kernels.cuda.emulate import Edit, EmulatedLauncher, EmulationError
from tests.kernels.cuda.emulate.worker import EmulatedCudaDevice

pytestmark = pytest.mark.planted_faults
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TRIALS = {
    trial.name: trial
    for encodes in (False, True)
    for trial in trials(Launches(BF16, E4M3, 64, encodes, not encodes, not encodes, capability=HOPPER))
    if not trial.method.endswith(("norm", "states"))
    or trial.name.endswith((" 248", " 1016", " 4088"))  # of one warp, of four, of more
    or trial.name
    in ("delta rule of 14", "state space of 14 in bfloat16")  # the others with states share no memory
    if trial.method not in ("pack", "experts", linear.FEWEST, linear.UNPACKED)
    or trial.name.endswith(("groups of 64, scales in bfloat16", "dense weights"))
}
LATENTS = (
    "decode attention to latents of 288",
    "drafts attention to latents of 288",
    "decode attention of 24 heads to chosen latents of 288",
    "index scores of 64",
)  # the others take long
TRIALS |= {
    trial.name: trial for trial in trials(Launches(BF16, BF16, 288, indexed=True)) if trial.name in LATENTS
}

TRIALS |= {
    trial.name: trial
    for trial in trials(Launches(BF16, E4M3, 64, packed=False, invariant=True))
    if "attention" in trial.name or trial.name.startswith("dense products")
}


def run(trial: Trial, *edits: Edit) -> str:
    kernels = CudaKernels(EmulatedLauncher(edits=edits, races=True), "cpu")
    return trial.why_wrong(kernels, torch.device("cpu"))


@pytest.mark.parametrize("name", TRIALS)
def test_no_kernel_races(name: str) -> None:
    assert run(TRIALS[name]) == ""


def test_sampling_does_not_race() -> None:
    assert why_sampling_is_wrong(EmulatedCudaDevice(EmulatedLauncher(races=True)), BF16) == ""


PACKED = "products with 4 bits, groups of 64, scales in bfloat16"
FAULTS = [
    (PACKED, "linear.cuh", "__syncwarp();  // the step is there", "// the step is there"),
    (PACKED, "linear.cuh", "__syncthreads();  // the stages are read", "// the stages are read"),
    (
        PACKED,
        "linear.cuh",
        "        }\n    __syncthreads();\n    for (int row",
        "        }\n    for (int row",
    ),
    (PACKED, "linear.cuh", "__syncthreads();  // the step is there", "// the step is there"),
    ("rms_norm of 1016", "norms.cu", "        __syncthreads();\n", ""),
    ("rows as integers", "quantised_rows.cu", "    __syncthreads();\n", ""),
    (
        "adapters",
        "lora.cu",
        "        __syncthreads();  // all threads are done",
        "        // all threads are done",
    ),
    ("adapters", "lora.cu", "        __syncthreads();\n        if (!is_there)", "        if (!is_there)"),
    (
        "delta rule of 14",
        "states.cu",
        "__syncthreads();  // the token is read",
        "// the token is read",
    ),
    (
        "experts with dense weights",
        "experts.cu",
        "    __syncthreads();\n    for (int chunk",
        "    for (int chunk",
    ),
    ("experts with dense weights", "experts.cu", "    __syncthreads();\n    int row =", "    int row ="),
    ("state space of 14 in bfloat16", "states.cu", "__syncthreads();  // the sums of", "// the sums of"),
    (
        "prefill attention over bfloat16, heads of 64",
        "prefill_attention.cu",
        "__syncthreads();  // these",
        "// these",
    ),
    (
        "prefill attention over float8_e4m3fn, heads of 64",
        "prefill.cuh",
        "    __syncwarp();\n    uint4* const out",
        "    uint4* const out",
    ),
    (
        "prefill attention of warpgroups over bfloat16, heads of 64",
        "warpgroup_attention.cu",
        "        fence_copies();\n        __syncthreads();\n",
        "        fence_copies();\n",
    ),
    (
        "decode attention over bfloat16, heads of 64",
        "decode_attention.cu",
        "        __syncwarp();\n        ring",
        "        ring",
    ),
    (LATENTS[0], "latent_attention.cu", "__syncthreads();  // these keys", "// these keys"),
    (LATENTS[0], "latent_attention.cu", "__syncthreads();  // all groups", "// all groups"),
    (LATENTS[1], "latent_attention.cu", "__syncthreads();  // the weights are", "// the weights are"),
    (LATENTS[1], "latent_attention.cu", "__syncthreads();  // the last factors", "// the last factors"),
    (LATENTS[1], "latent_attention.cu", "    __syncthreads();\n    const i64 place", "    const i64 place"),
]


@pytest.mark.parametrize(("name", "file", "old", "new"), FAULTS)
def test_a_missing_barrier_is_named(name: str, file: str, old: str, new: str) -> None:
    with pytest.raises(
        EmulationError, match=r"a race: thread \d+ \w+ shared memory that thread \d+ \w+, with no"
    ):
        run(TRIALS[name], Edit(file, old, new))
