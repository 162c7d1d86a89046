"""Parts of an engine's configuration, as `get_parallel_config` and the like return them."""

from __future__ import annotations

import msgspec

from pagewire.ipc.wire.messages import EngineInfo


class ModelConfig(msgspec.Struct, frozen=True):
    """The model of an engine, with vLLM's names. `info` of an engine has more.

    model: as the options name it. tokenizer: folder or repository. tokenizer_mode: "auto" or "slow".
    dtype: of weights and activations, such as "bfloat16". max_model_len: tokens of prompt and output together.
    served_model_name: the first one. seed: of requests without one. max_logprobs: log probabilities per token.
    architecture: the class in the checkpoint's config.json. runner_type: "generate" or "pooling".
    trust_remote_code, skip_tokenizer_init: as the options say.
    """

    model: str
    tokenizer: str
    tokenizer_mode: str
    trust_remote_code: bool
    dtype: str
    seed: int
    max_model_len: int
    max_logprobs: int
    served_model_name: str
    skip_tokenizer_init: bool
    architecture: str
    vocab_size: int
    runner_type: str

    def get_vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.vocab_size


class ParallelConfig(msgspec.Struct, frozen=True):
    """How a model is split. world_size: number of workers."""

    tensor_parallel_size: int
    pipeline_parallel_size: int
    world_size: int


class SchedulerLimits(msgspec.Struct, frozen=True):
    """Limits of the scheduler, in tokens and sequences. policy: "fcfs" or "priority"."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    policy: str


class DecodingConfig(msgspec.Struct, frozen=True):
    """How structured output is made."""

    guided_decoding_backend: str = "llguidance"


def model_config(info: EngineInfo) -> ModelConfig:
    """The engine's model."""
    return ModelConfig(
        model=info.model,
        tokenizer=info.tokenizer,
        tokenizer_mode=info.tokenizer_mode,
        trust_remote_code=info.trust_remote_code,
        dtype=info.dtype,
        seed=info.seed,
        max_model_len=info.max_model_len,
        max_logprobs=info.max_logprobs,
        served_model_name=info.served_model_names[0],
        skip_tokenizer_init=info.skip_tokenizer_init,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        runner_type="generate" if info.pooling is None else "pooling",
    )


def parallel_config(info: EngineInfo) -> ParallelConfig:
    """How the engine's model is split."""
    shards, stages = info.tensor_parallel_size, info.pipeline_parallel_size
    return ParallelConfig(shards, stages, shards * stages)


def scheduler_config(info: EngineInfo) -> SchedulerLimits:
    """Limits of the engine's scheduler."""
    return SchedulerLimits(
        info.max_num_batched_tokens, info.max_num_seqs, info.max_model_len, info.scheduling_policy
    )
