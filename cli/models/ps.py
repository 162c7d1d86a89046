"""`pagewire ps`: the models that a server has in memory."""

from __future__ import annotations

import argparse
import json
import os
import urllib.error
import urllib.request
from typing import Any

from pagewire.cli.commands import SUMMARIES
from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show

ROW = "{:<50} {:>10}  {:>8}  {}"
TIMEOUT_SECONDS = 30
MAX_ANSWER_BYTES = 16 << 20
FIELDS = ("name", "size", "context_length", "expires_at")
NEVER = "9999"  # the year until which a model stays that no idleness ends


def register(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "ps",
        help=SUMMARIES["ps"],
        description="List the models that a server has in memory, the size of their files, their context length, "
        "and when they end if they are not used. `pagewire top` watches a core.",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="of the server, without /v1 (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="its API key (default: $PAGEWIRE_API_KEY or $OPENAI_API_KEY)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the models.

    Raises:
        UsageError: the URL is none of HTTP. OSError: the server cannot be reached. ValueError: it refuses.
    """
    show(ROW.format("NAME", "FILES", "CONTEXT", "UNTIL"))
    for model in running(options.url, options.api_key):
        end = str(model["expires_at"])
        size = f"{int(model['size']) / 1e9:.2f} GB"
        until = "always" if end.startswith(NEVER) else end
        show(ROW.format(str(model["name"]), size, int(model["context_length"]), until))
    return 0


def running(url: str, api_key: str | None) -> list[dict[str, Any]]:
    """The models in a server's memory, as /api/ps has them. Raises as `run`."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url must begin with http:// or https://, got {url!r}")
    key = api_key or os.environ.get("PAGEWIRE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/api/ps", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            content = answer.read(MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"the server answered {error.code}: {error.read(300).decode(errors='replace')}"
        ) from error
    except urllib.error.URLError as error:
        raise OSError(f"no server answers at {url}: {error.reason}") from error
    try:
        models: list[dict[str, Any]] = json.loads(content)["models"]
        return [{name: model[name] for name in FIELDS} for model in models]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"what answers at {url} is no server of pagewire") from None
