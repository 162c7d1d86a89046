"""Environment variables: their names, those that nothing reads, and their values as flags and numbers."""

from __future__ import annotations

import os

from pagewire.ipc.bounds import unknown_name
from pagewire.ipc.compatibility import VARIABLES, warn_once
from pagewire.ipc.quoting import MAX_QUOTED, quoted, shortened

FLAGS = {
    "PAGEWIRE_ALLOW_LONG_MAX_MODEL_LEN": False,
    "PAGEWIRE_CONFIGURE_LOGGING": True,
    "PAGEWIRE_KEEP_ALIVE_ON_ENGINE_DEATH": False,
    "PAGEWIRE_USE_MODELSCOPE": False,
}
"""The variables that are true or false, and what they are if they are not set."""
READ = frozenset(
    {
        *FLAGS,
        "PAGEWIRE_API_KEY",
        "PAGEWIRE_ASSETS_CACHE",
        "PAGEWIRE_AUDIO_FETCH_TIMEOUT",
        "PAGEWIRE_CACHE_ROOT",
        "PAGEWIRE_CPU_ISA",
        "PAGEWIRE_CPU_KVCACHE_SPACE",
        "PAGEWIRE_CPU_OMP_THREADS_BIND",
        "PAGEWIRE_ENGINE_ITERATION_TIMEOUT_S",
        "PAGEWIRE_GRAMMAR_TIMEOUT_S",
        "PAGEWIRE_HEALTH_TIMEOUT_S",
        "PAGEWIRE_HEARTBEAT_TIMEOUT_S",
        "PAGEWIRE_HOST_IP",
        "PAGEWIRE_IMAGE_FETCH_TIMEOUT",
        "PAGEWIRE_LOGGING_CONFIG_PATH",
        "PAGEWIRE_LOGGING_LEVEL",
        "PAGEWIRE_LOG_FORMAT",
        "PAGEWIRE_MAX_N_SEQUENCES",
        "PAGEWIRE_PLUGINS",
        "PAGEWIRE_PORT",
        "PAGEWIRE_PP_LAYER_PARTITION",
        "PAGEWIRE_RAY_PLACEMENT_GROUP",
        "PAGEWIRE_RPC_BASE_PATH",
        "PAGEWIRE_TORCH_PROFILER_DIR",
        "PAGEWIRE_WEIGHT_CACHE_SPACE",
        "PAGEWIRE_WORKER_START_TIMEOUT_S",
    }
)
"""The variables that pagewire reads."""
PREFIXES = ("PAGEWIRE_", "VLLM_")
MAX_UNREAD = 64  # variables that are looked up: to find the nearest name takes a fraction of a millisecond
# In the names of variables that Kubernetes sets for a service named "vllm" or "pagewire".
SERVICE_PARTS = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_UDP")
VALUES_OF_FLAGS = {"0": False, "false": False, "1": True, "true": True}


def check_environment() -> None:
    """Log a warning for each variable of pagewire or vLLM that nothing reads. A program calls it when it starts.

    Raises:
        ValueError: a flag is neither true nor false.
    """
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
    return f"set {ours}" if ours in READ else unknown_name("environment variable", ours, READ)


def is_of_service(name: str) -> bool:
    """True for a variable that Kubernetes sets for a service."""
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
