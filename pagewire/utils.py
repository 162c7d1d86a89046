"""A parser of arguments and random ids, where programs written for vLLM look for them."""

from uuid import uuid4

from pagewire.ipc.options.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """Return 32 random hexadecimal digits, for the id of a request."""
    return uuid4().hex
