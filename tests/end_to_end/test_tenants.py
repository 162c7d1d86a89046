"""Keys with names on a real engine: no tenant learns from the prefix cache what another has sent."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.server.http.options import ServerOptions
from tests.serving import serving

PROMPT = list(range(10, 110))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_a_key_finds_its_own_prefixes_only(address: str, tmp_path: Path, path: str) -> None:
    file = tmp_path / "keys"
    file.write_text("alice alice-secret-key\nbob bob-secret-key\n")
    file.chmod(0o600)

    def cached(url: str, name: str, num_right: int) -> int:
        """Tokens that `name` is told were cached, of a prompt that begins as that of alice."""
        ids = PROMPT[:num_right] + [5] * (len(PROMPT) - num_right)
        text = " ".join(map(str, ids))
        body = {"prompt": ids} if path == "/v1/completions" else {"input": text, "max_output_tokens": 1}
        headers = {"authorization": f"Bearer {name}-secret-key", "content-type": "application/json"}
        data = json.dumps({"max_tokens": 1, **body} if "prompt" in body else body).encode()
        with urllib.request.urlopen(urllib.request.Request(url + path, data, headers), timeout=60) as answer:
            usage: dict[str, Any] = json.load(answer)["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    with serving(address, ServerOptions(port=0, api_key_file=str(file))) as url:
        assert cached(url, "alice", 100) == 0
        assert cached(url, "bob", 100) == 0
        assert cached(url, "alice", 100) >= 96 and cached(url, "bob", 100) >= 96
