"""Whether cores are replicas: a request that was prepared for one must give the same tokens on another."""

from __future__ import annotations

from pagewire.ipc.messages import EngineInfo

# What replicas have in common. Sizes of memory may differ.
EQUAL = (
    *("model", "architecture", "dtype", "figures", "vocab_size", "max_model_len", "block_size"),
    *("tokenizer", "tokenizer_revision", "tokenizer_mode", "skip_tokenizer_init", "eos_token_id"),
    *("generation_config", "max_logprobs", "scheduling_policy", "served_model_names", "pooling", "lora"),
    "embeddings",
)


def differences(first: EngineInfo, second: EngineInfo) -> dict[str, tuple[object, object]]:
    """What keeps two engines from being replicas: by name, the value of each."""
    kinds = [info.device.partition(":")[0] for info in (first, second)]
    pairs: dict[str, tuple[object, object]] = {
        name: (getattr(first, name), getattr(second, name)) for name in EQUAL
    }
    pairs["device"] = (kinds[0], kinds[1])
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other}


def check_same(first: EngineInfo, second: EngineInfo, label: str) -> None:
    """Check that an engine is a replica of the first one. label: its address, for the error.

    Raises:
        ValueError: it is not; the text names what differs.
    """
    if different := differences(first, second):
        text = "; ".join(f"{name} is {other!r}, not {one!r}" for name, (one, other) in different.items())
        raise ValueError(f"the core at {label} is no replica of the others: {text:.2000}")
