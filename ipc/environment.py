"""Environment variables: what those that pagewire reads mean, those that nothing reads, their values.

Each is also read under the name that it has in vLLM (`VLLM_...`) where its own is not set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pagewire.ipc.bounds import unknown_name
from pagewire.ipc.compatibility import VARIABLES, warn_once
from pagewire.ipc.quoting import MAX_QUOTED, quoted, shortened


class Variable(NamedTuple):
    """A variable that pagewire reads. meaning, default: for docs/options.md."""

    meaning: str
    default: str


FLAGS = {
    "PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN": False,
    "PAGEWIRE_CONFIGURE_LOGGING": True,
    "PAGEWIRE_KEEP_ALIVE_ON_ENGINE_DEATH": False,
    "PAGEWIRE_USE_MODELSCOPE": False,
}
"""The variables that are true or false, and what they are if they are not set."""
READ: Mapping[str, Variable] = {
    "PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN": Variable("`1`: `max_model_len` over the model's own", "off"),
    "PAGEWIRE_API_KEY": Variable(
        "a key that clients of `pagewire serve` must show; set but empty is an error", "none"
    ),
    "PAGEWIRE_ASSETS_CACHE": Variable(
        "folder of the pictures and sounds of `pagewire.assets`", "`assets` below `PAGEWIRE_CACHE_ROOT`"
    ),
    "PAGEWIRE_AUDIO_FETCH_TIMEOUT": Variable("seconds for the download of a sound (docs/media.md)", "5"),
    "PAGEWIRE_CACHE_ROOT": Variable("compiled kernels and packed weights", "`~/.cache/pagewire`"),
    "PAGEWIRE_CONFIGURE_LOGGING": Variable("`0`: leave logging as it is", "1"),
    "PAGEWIRE_CPU_ISA": Variable(
        "`amx_fp16`, `amx`, `avx512_bf16`, `avx512`, `avx2`, on ARM `neon_bf16`, `neon_dot`, `neon`; `portable`; "
        "`reference` (PyTorch alone); "
        "`amx_emulated` (for tests: the bits of matrix tiles on any CPU, slowly)",
        "the best there is",
    ),
    "PAGEWIRE_CPU_KVCACHE_SPACE": Variable("most GiB of KV cache on a CPU", "4"),
    "PAGEWIRE_CPU_OMP_THREADS_BIND": Variable(
        "cores of the CPU worker, such as `0-3`; with several workers on a machine a list for each: `0-31|32-63`",
        "the usable cores, shared evenly",
    ),
    "PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S": Variable(
        "time limit of one step, or of a call without progress, after which the worker is replaced", "300"
    ),
    "PAGEWIRE_GRAMMAR_TIMEOUT_S": Variable(
        "time that a grammar may wait for a thread of each lane, and again that it may take to compile, half of it "
        "as processor time",
        "10",
    ),
    "PAGEWIRE_HEALTH_TIMEOUT_S": Variable(
        "time for a step (or four times the longest one yet) or a ping, after which `/health` is 503", "5"
    ),
    "PAGEWIRE_HEARTBEAT_TIMEOUT_S": Variable(
        "silence, or time over the limit of a call, after which a frontend or a core counts as hung", "30"
    ),
    "PAGEWIRE_HOST_IP": Variable(
        "this machine's address for other machines: where the core listens for workers that join, and workers "
        "for each other",
        "loopback for the core; for a worker, the address on its way to the core",
    ),
    "PAGEWIRE_IMAGE_FETCH_TIMEOUT": Variable("seconds for the download of a picture (docs/media.md)", "5"),
    "PAGEWIRE_KEEP_ALIVE_ON_ENGINE_DEATH": Variable("`1`: as `--keep-alive-on-engine-death`", "0"),
    "PAGEWIRE_LOGGING_CONFIG_PATH": Variable("JSON file of a logging configuration", "none"),
    "PAGEWIRE_LOGGING_LEVEL": Variable("of all logs", "`INFO`"),
    "PAGEWIRE_LOG_FORMAT": Variable("`text` or `json`", "`text`"),
    "PAGEWIRE_MAX_N_SEQUENCES": Variable("most sequences per request", "64"),
    "PAGEWIRE_PLUGINS": Variable(
        "plugins that are loaded, separated by commas; empty: none (docs/own_models.md)",
        "all that are installed",
    ),
    "PAGEWIRE_PORT": Variable(
        "port for workers that join; workers, and the core for other purposes, take the first free one from it on",
        "5710; any for workers",
    ),
    "PAGEWIRE_PP_LAYER_PARTITION": Variable(
        "number of layers of each stage of a pipeline, such as `8,8,9`", "as even as possible"
    ),
    "PAGEWIRE_PULLED_DIR": Variable(
        "folder of the models of `pagewire pull`", "`pulled` below `PAGEWIRE_CACHE_ROOT`"
    ),
    "PAGEWIRE_RAY_PLACEMENT_GROUP": Variable(
        "set for a core by the process that starts it: the placement group of its workers in Ray", "none"
    ),
    "PAGEWIRE_RPC_BASE_PATH": Variable(
        "where private sockets go", "`$XDG_RUNTIME_DIR`, else the temporary folder"
    ),
    "PAGEWIRE_RPC_GET_DATA_TIMEOUT_MS": Variable(
        "milliseconds in which the core must answer for `/metrics` and other questions about its state, which "
        "else get status 503",
        "5000",
    ),
    "PAGEWIRE_TORCH_PROFILER_DIR": Variable(
        "folder of the traces that `start_profile` and `stop_profile` make",
        "Python: a new temporary one; `POST /start_profile` is refused without it",
    ),
    "PAGEWIRE_USE_MODELSCOPE": Variable(
        "`1`: models come from ModelScope, not from the Hugging Face hub (`pip install 'pagewire[modelscope]'`; "
        "`MODELSCOPE_API_TOKEN`, `MODELSCOPE_ENDPOINT`)",
        "0",
    ),
    "PAGEWIRE_WEIGHT_CACHE_SPACE": Variable(
        "most GiB of packed weights on disk; never more than half of what the disk has left for them", "32"
    ),
    "PAGEWIRE_WORKER_START_TIMEOUT_S": Variable(
        "time without progress (processor time, bytes read) while a worker starts, after which it is replaced",
        "300",
    ),
}
"""The variables that pagewire reads, those that it sets for its own processes included."""
INTERNAL = frozenset({"PAGEWIRE_RAY_PLACEMENT_GROUP"})
"""Those that nobody sets by hand."""
FOREIGN: Mapping[str, Variable] = {
    "AWS_*": Variable("access to models in S3, as other programs read them", "none"),
    "CUDA_VISIBLE_DEVICES": Variable("the GPUs of this machine that workers may use", "all"),
    "CXX": Variable("the C++ compiler of the CPU kernels", "`g++`, else `clang++`"),
    "HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE": Variable(
        "as the Hugging Face hub's client reads them", "its own"
    ),
    "LWS_WORKER_INDEX, RANK": Variable("number of a worker that joins (`pagewire worker --join`)", "none"),
    "MODELSCOPE_API_TOKEN, MODELSCOPE_ENDPOINT": Variable("access to models on ModelScope", "its own"),
    "RAY_ADDRESS": Variable(
        "the Ray cluster of `distributed_executor_backend=ray`", "one on this machine, else a new one"
    ),
    "S3_ACCESS_KEY_ID, S3_SECRET_ACCESS_KEY, S3_ENDPOINT_URL": Variable(
        "access to models in S3, in place of `AWS_*`", "`AWS_*`"
    ),
    "XDG_CACHE_HOME": Variable(
        "folder in which `pagewire` is the default of `PAGEWIRE_CACHE_ROOT`", "`~/.cache`"
    ),
    "XDG_RUNTIME_DIR": Variable(
        "folder of the sockets, unless `PAGEWIRE_RPC_BASE_PATH` is set", "a temporary folder"
    ),
}
"""Variables of other programs that pagewire follows."""
PREFIXES = ("PAGEWIRE_", "VLLM_")
MAX_UNREAD = 64  # variables that are looked up: to find the nearest name takes a fraction of a millisecond
# In the names of variables that Kubernetes sets for a service named "vllm" or "pagewire".
SERVICE_PARTS = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_UDP")
VALUES_OF_FLAGS = {"0": False, "false": False, "1": True, "true": True}

_adopted: set[str] = set()  # names of vLLM, from whose values this process has set its own variables


def adopt_vllm_names() -> None:
    """Set each variable of `READ` that is not set to the value that it has under its name in vLLM.

    Child processes inherit them. `check_environment` logs which ones, once logging is configured.
    """
    for ours in READ.keys() - INTERNAL:
        theirs = ours.replace(*PREFIXES, 1)
        if ours not in os.environ and theirs in os.environ and not is_of_service(theirs):
            os.environ[ours] = os.environ[theirs]
            _adopted.add(theirs)


def check_environment() -> None:
    """Take over variables of vLLM, and log a warning for each of pagewire or vLLM that nothing reads.

    A program calls it when it starts.

    Raises:
        ValueError: a flag is neither true nor false.
    """
    adopt_vllm_names()
    if _adopted:
        warn_once("vLLM's variables", f"read in place of PAGEWIRE_*: {', '.join(sorted(_adopted))}")
    for name in FLAGS:
        env_flag(name)
    names = sorted(name for name in os.environ if name.startswith(PREFIXES) and name not in READ)
    for name in names[:MAX_UNREAD]:
        if reason := reason_unread(name):
            warn_once(name, f"{shortened(name, MAX_QUOTED)} has no effect: {reason}")
    if len(names) > MAX_UNREAD:
        warn_once("environment", f"{len(names) - MAX_UNREAD} more variables may have no effect: {PREFIXES}")


def reason_unread(name: str) -> str | None:
    """Why a variable that nothing reads has no effect; None if no warning is needed.

    None is needed if its counterpart is set, or if a test or Kubernetes has set it.
    """
    ours, theirs = (prefix + name.partition("_")[2] for prefix in PREFIXES)
    if (ours in os.environ and ours in READ) or name.startswith("PAGEWIRE_TEST_") or is_of_service(name):
        return None
    if absent := VARIABLES.get(theirs):
        return f"{absent.reason}; {absent.instead}"
    return unknown_name("environment variable", ours, READ)


def is_of_service(name: str) -> bool:
    """True for a variable that Kubernetes sets for a service, such as VLLM_PORT=tcp://10.0.0.1:80."""
    is_url = os.environ.get(name, "").startswith(("tcp://", "udp://"))
    return is_url or any(part in name for part in SERVICE_PARTS)


def env_flag(name: str) -> bool:
    """The value of a variable in `FLAGS`: "1" or "true", "0" or "false"; its default if it is empty or not set.

    Raises:
        ValueError: it is something else.
    """
    text = os.environ.get(name, "").strip().lower()
    if text and text not in VALUES_OF_FLAGS:
        raise ValueError(f"{name} must be 0 or 1, got {quoted(text)}")
    return VALUES_OF_FLAGS.get(text, FLAGS[name])


def cache_root() -> Path:
    """The folder of what is kept between runs: `$PAGEWIRE_CACHE_ROOT`, or `pagewire` in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("PAGEWIRE_CACHE_ROOT") or f"{cache}/pagewire").expanduser()


def env_float(name: str, default: float) -> float:
    """The number in an environment variable, or `default` if it is not set.

    Raises:
        ValueError: the variable is not a number.
    """
    text = os.environ.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {text!r}") from None
