"""The budget of one request, and of all in a core: the largest sizes that are accepted, each declared here only.

Limits of a `Request` hold for every frontend: `ipc.params` and `ipc.items` have them in their annotations, so that
msgspec checks a list of a message before it is built, and the core refuses what a frontend did not check. Limits of
an HTTP body are the server's own; a program that uses `LLM` does not meet them. They leave room for anything but
mistakes and attacks.
"""

from __future__ import annotations

# ---------------------------------------------------------------- a request: characters of a string

MAX_NAME_CHARS = 1024  # request id, cache salt, user, and whatever else names something
MAX_STOP_CHARS = 1024  # each stop string
MAX_BAD_WORD_CHARS = 256  # each bad word
MAX_BAD_WORDS_CHARS = 1 << 15  # all bad words together
MAX_OPTIONS_CHARS = 4096  # arguments of a model's processor, as JSON
MAX_STRUCTURE_CHARS = 1 << 18  # a schema, regular expression or grammar, or all choices together

# ---------------------------------------------------------------- a request: lengths of a list

MAX_STOPS = 128  # stop strings
MAX_STOP_TOKENS = 4096  # stop tokens: each new token is looked for among them
MAX_BAD_WORDS = 2048
MAX_BAD_WORD_SPELLINGS = 4 * MAX_BAD_WORDS  # their token sequences, of which a word has up to three
MAX_TOKENS_OF_VOCABULARY = (
    1 << 19
)  # entries of logit_bias and allowed_token_ids: more than any vocabulary has
MAX_CHOICES = 1 << 14  # strings of a choice
MAX_TOKENS = 1 << 22  # tokens of a prompt or an output: more than any model's context length
MAX_RESUMED_SEQUENCES = 1 << 14  # outputs of a request that goes on: more than any n
MAX_MEDIA = 1 << 10  # media of a prompt
MAX_MEDIUM_BYTES = 96 << 20  # a decoded medium: a picture of 33 megapixels, or 26 minutes of sound at 16 kHz
MAX_EMBEDDINGS_BYTES = 1 << 26  # embeddings of a prompt: 8,192 tokens of 4,096 numbers of 16 bits
MAX_EXTRA_BYTES = 1 << 16  # extra_args, encoded
# Tokens in logit_bias, allowed_token_ids, stop_token_ids and bad words, times the sequences that have them: they
# are applied to each sequence's logits.
MAX_LOGIT_EDITS = 1 << 20

# ---------------------------------------------------------------- a message from a frontend

MAX_REQUESTS_PER_MESSAGE = 1024
# First frame of a message with several requests. It is decoded in one go: 25 ms a MiB where it is full of numbers.
MAX_BATCH_BYTES = 2 << 20
MAX_ABORTS_PER_MESSAGE = 1 << 18  # keys, and sequences, of one `Abort`: more than may wait and run
MAX_ARGUMENTS = 1 << 10  # of a call
MAX_CALL_BYTES = 1 << 20  # of an encoded call with its arguments, where workers run it
MAX_WEIGHT_BYTES = 1 << 19  # of weights, in a call
MAX_HELLO_BYTES = 1 << 16  # a message before the core is ready, when it only takes greetings
TEXT_BYTES = 4 << 20  # the strings and short lists of a request, and what surrounds them
TOKEN_BYTES = 5  # a token id, encoded
EDIT_BYTES = 20  # a token in logit_bias, allowed_token_ids and stop_token_ids together, encoded


def message_bytes(max_model_len: int, vocab_size: int, max_n: int) -> int:
    """The largest first frame of a message that a frontend may send to an engine with these sizes, in bytes.

    It has room for one request with the longest prompt, `max_n` sequences that are all but complete (it is
    submitted again after a core was lost), and parameters that name the whole vocabulary.
    """
    return TEXT_BYTES + EDIT_BYTES * vocab_size + TOKEN_BYTES * max_model_len * (1 + max_n)


# ---------------------------------------------------------------- the requests that wait and run in a core

# Memory of all of them. A frontend that is alone may have half of it, a tenant that is alone there half of that.
MIN_UNFINISHED_BYTES = 4 << 30
POINTER_BYTES = 8  # a token id in a list, whose object all lists share
VALUE_BYTES = 64  # a number in a list or a mapping of its own
OTHER_BYTES = 1 << 28  # embeddings, bad words, strings


def unfinished_bytes(max_model_len: int, vocab_size: int, max_n: int) -> int:
    """The memory that unfinished requests may take in a core with an engine of these sizes, in bytes.

    A quarter of it, which is what one tenant may take, has room for the largest request: the longest prompt,
    `max_n` sequences that are all but complete, and parameters that name the whole vocabulary.
    """
    tokens = POINTER_BYTES * max_model_len * (1 + 2 * max_n)
    parameters = 3 * VALUE_BYTES * vocab_size  # a token in allowed_token_ids, and in logit_bias with its bias
    return max(MIN_UNFINISHED_BYTES, 4 * (tokens + parameters + OTHER_BYTES))


# ---------------------------------------------------------------- an HTTP body

MAX_CONTAINERS = 1 << 19  # opening brackets: of 3 bytes in a body, the decoder makes an object of 64 and more
MAX_PROMPTS = 1024  # prompts of a completion
MAX_POOLED_INPUTS = 2048  # texts to pool: as many as OpenAI takes
MAX_HTTP_POOLED_BYTES = 1 << 25  # results of one answer, as float32 numbers; JSON takes five times as much
MAX_OPEN_POOLED_BYTES = (
    1 << 27
)  # those of all open answers together; further ones wait until clients have read some
SMALL_POOLED_BYTES = 1 << 16  # of each answer, which are not counted: small ones pass while large ones wait
MAX_WAITING_ANSWERS = 64  # that wait for memory; each keeps its prompts meanwhile
MAX_MESSAGES = 1 << 14  # messages of a chat, or input items of a response
MAX_PARTS = 1 << 14  # content parts, and tool calls, of all messages together
MAX_TOOLS = 1024
MAX_TOOL_VALUES = 1 << 16  # in all tools together: objects, lists, and what is in them
MAX_HTTP_SEQUENCES = 1024  # prompts x n: default of --max-request-sequences
MAX_HTTP_TOKENS = 1 << 22  # prompts x n x max_tokens: default of --max-request-tokens
# Log probabilities (candidates of all positions) that are kept for one HTTP request at a time: of a whole answer,
# all that it has; of a stream, those that the client has yet to read.
MAX_HTTP_LOGPROBS = 1 << 18  # default of --max-request-logprobs

# ---------------------------------------------------------------- a text

# Characters of a prompt that are tokenized, per token of the model's context length. Text has four, source code
# with deep indentation ten.
MAX_CHARS_PER_TOKEN = 16
MIN_CHARS = 1 << 17  # limit for models of short contexts: a text may be truncated, or only be counted
MIN_DETOKENIZED = (
    1 << 17
)  # tokens that /detokenize takes for any model; for one with a longer context, as many as that
