"""The door of the frontend: what a server takes of it (`frontend/server`, `frontend/route`), and nothing else.

Each name is loaded from its home when it is first used, so that nobody loads more than is needed. Whatever has no
name here may change without a look at servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.frontend import lazy_names

if TYPE_CHECKING:
    from pagewire.frontend.api.async_llm import AsyncLLM, request_ids
    from pagewire.frontend.api.beam_batch import search_all
    from pagewire.frontend.api.off_loop import (
        OFF_LOOP_CHARS,
        media_threads,
        num_chars,
        off_loop,
        template_threads,
        tokenize_off_loop,
    )
    from pagewire.frontend.core.client import CoreClient
    from pagewire.frontend.core.core_source import CoreProcess, CoreSource, RunningCores, longest_silence
    from pagewire.frontend.core.metrics import read_metrics
    from pagewire.frontend.core.open_session import intake_opener, own_salt
    from pagewire.frontend.core.session import Session
    from pagewire.frontend.core.spawned_cores import SpawnedCores
    from pagewire.frontend.core.supervisor import EngineClient, Owner, Supervisor
    from pagewire.frontend.media.access import MediaAccess
    from pagewire.frontend.media.items import MediaItem
    from pagewire.frontend.media.keys import has_media
    from pagewire.frontend.media.limits import MAX_SOURCE_BYTES
    from pagewire.frontend.requests.answer_budget import LogprobBudget
    from pagewire.frontend.requests.checked_params import check_generates, check_vocabulary
    from pagewire.frontend.requests.decisions import (
        Answer,
        AskedQuestion,
        Diagnostics,
        PreparedQuestion,
        Questions,
        decision_variables,
        decisions_of,
        reads_of,
    )
    from pagewire.frontend.requests.inputs import Prepared, prompts_of, salt_of
    from pagewire.frontend.requests.lora import LoRARequest
    from pagewire.frontend.requests.outputs import (
        CompletionOutput,
        RequestMetrics,
        RequestOutput,
    )
    from pagewire.frontend.requests.pooling.inputs import complete_pooling_params
    from pagewire.frontend.requests.pooling.outputs import PoolingRequestOutput
    from pagewire.frontend.requests.pooling.scoring import ScorePlan
    from pagewire.frontend.requests.prompt_adapters import PromptAdapterRequest
    from pagewire.frontend.requests.safetensors import read_tensors
    from pagewire.frontend.speech.recording import Recording
    from pagewire.frontend.speech.transcriber import Transcriber, TranscriptionParams
    from pagewire.frontend.speech.transcript import (
        DurationUsage,
        TranscriptFormat,
        Transcription,
        VerboseTranscription,
    )
    from pagewire.frontend.text.chat_template import chat_prompt, check_template, template_source
    from pagewire.frontend.text.conversation import as_text
    from pagewire.frontend.text.infill import infill_form
    from pagewire.frontend.text.length import ContextLengthError, check_characters, encode_within
    from pagewire.frontend.text.logprobs import Logprob, PromptLogprobs, token_bytes, token_text
    from pagewire.frontend.text.offsets import TextOffsets, prompt_offsets
    from pagewire.frontend.text.prompts import PromptType, TextPair, TokensPrompt
    from pagewire.frontend.text.tokenizer import Tokenizer
    from pagewire.frontend.text.tool_prompts import CALL_BEGIN, CALL_END, knowledge_of

# Names by the module of `frontend` that defines them.
_HOMES = {
    "api.async_llm": "AsyncLLM request_ids",
    "api.beam_batch": "search_all",
    "api.off_loop": "OFF_LOOP_CHARS media_threads num_chars off_loop template_threads tokenize_off_loop",
    "core.client": "CoreClient",
    "core.core_source": "CoreProcess CoreSource RunningCores longest_silence",
    "core.metrics": "read_metrics",
    "core.open_session": "intake_opener own_salt",
    "core.session": "Session",
    "core.spawned_cores": "SpawnedCores",
    "core.supervisor": "EngineClient Owner Supervisor",
    "media.access": "MediaAccess",
    "media.items": "MediaItem",
    "media.keys": "has_media",
    "media.limits": "MAX_SOURCE_BYTES",
    "requests.answer_budget": "LogprobBudget",
    "requests.checked_params": "check_generates check_vocabulary",
    "requests.decisions": (
        "Answer AskedQuestion Diagnostics PreparedQuestion Questions decisions_of reads_of decision_variables"
    ),
    "requests.inputs": "Prepared prompts_of salt_of",
    "requests.lora": "LoRARequest",
    "requests.outputs": "CompletionOutput RequestMetrics RequestOutput",
    "requests.pooling.inputs": "complete_pooling_params",
    "requests.pooling.outputs": "PoolingRequestOutput",
    "requests.pooling.scoring": "ScorePlan",
    "requests.prompt_adapters": "PromptAdapterRequest",
    "requests.safetensors": "read_tensors",
    "speech.recording": "Recording",
    "speech.transcriber": "Transcriber TranscriptionParams",
    "speech.transcript": "DurationUsage TranscriptFormat Transcription VerboseTranscription",
    "text.chat_template": "chat_prompt check_template template_source",
    "text.conversation": "as_text",
    "text.infill": "infill_form",
    "text.length": "ContextLengthError check_characters encode_within",
    "text.logprobs": "Logprob PromptLogprobs token_bytes token_text",
    "text.offsets": "TextOffsets prompt_offsets",
    "text.prompts": "PromptType TextPair TokensPrompt",
    "text.tokenizer": "Tokenizer",
    "text.tool_prompts": "CALL_BEGIN CALL_END knowledge_of",
}

__getattr__, __dir__ = lazy_names(__name__, "pagewire.frontend", _HOMES)
