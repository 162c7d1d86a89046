"""Runs the trials of a first run on a device, in a process of its own.

python -m pagewire.workers.device.trial_process cuda:0 bfloat16 float8_e4m3fn 64 --skip 0 --lifeline FD
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from pagewire.ipc.host.lifeline import die_with_parent
from pagewire.kernels.cuda.variants import Launches
from pagewire.workers.device.cuda import CudaDevice
from pagewire.workers.device.first_run import KINDS, NO_TRIAL, NoTrialError, all_trials, verdict


def main() -> int:
    """Run trials in this process: print a line at the start, and the verdict of each, as JSON.

    Returns the exit status. After an exception the driver may refuse everything, so the process ends, and the next
    one runs the other trials.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("device")
    parser.add_argument("dtype")
    parser.add_argument("kv_dtype")
    parser.add_argument("head_dim", type=int)
    for kind in KINDS:
        parser.add_argument(f"--{kind}", action="store_true")
    parser.add_argument("--skip", type=int, required=True, metavar="N")
    parser.add_argument("--lifeline", required=True, type=int, metavar="FD")
    options = parser.parse_args()
    die_with_parent(options.lifeline)
    dtype, kv_dtype = (getattr(torch, name) for name in (options.dtype, options.kv_dtype))
    kinds = {kind: getattr(options, kind) for kind in KINDS}
    device = CudaDevice.open(torch.device(options.device).index)
    capability = device.launcher.capability
    launches = Launches(dtype, kv_dtype, options.head_dim, **kinds, capability=capability)
    print("ready", flush=True)
    for tried in all_trials(device, launches)[options.skip :]:
        try:
            reason = verdict(tried)
        except NoTrialError as error:
            print(error, file=sys.stderr)
            return NO_TRIAL
        print(json.dumps(reason), flush=True)
        if reason.startswith("failed"):
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
