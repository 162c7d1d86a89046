"""The commands of `pagewire`: a module for each, which is imported when its command is given."""

SUMMARIES = {
    "generate": "complete a prompt",
    "chat": "talk to a model",
    "transcribe": "write what is said in a recording",
    "embed": "embed texts",
    "rerank": "sort documents for a query",
    "serve": "serve a model over HTTP with OpenAI's API",
    "core": "run an engine core that frontends attach to",
    "route": "serve several cores of one model as if they were one",
    "top": "watch a running core: its frontends, requests and speed",
    "run-batch": "answer an OpenAI batch file",
    "bench": "measure speed",
    "inspect": "what a model takes, and whether it fits, without loading it",
    "quantize": "write a copy of a model with weights of 8 or 4 bits",
    "worker": "run a worker that joins a core on this or another machine",
    "keys": "make an API key or a CURVE certificate",
    "kernels": "compile CUDA kernels ahead of time",
    "doctor": "check whether CUDA kernels can run here",
    "collect-env": "print versions and hardware, for a bug report",
}
"""Names of the commands, and what each does in a line of `pagewire --help`."""
