"""An argument parser that takes options in several spellings. It imports next to nothing (`pagewire --help`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser that takes --max_model_len for --max-model-len, and --x=false for --no-x."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse `args` as argparse does, in each of these spellings. Sub-commands use this too."""
        words = self._spelled(sys.argv[1:] if args is None else args)
        return super().parse_known_args(words, namespace or argparse.Namespace())

    def _spelled(self, args: Sequence[str]) -> list[str]:
        """The arguments as this parser declares them."""
        end = args.index("--") if "--" in args else len(args)
        words: list[str] = []
        for word in args[:end]:
            name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
            if name not in self._option_string_actions:
                name = name.replace("_", "-")
            option = name or "".join(words[-1:])
            if value.lower() in ("true", "false") and self._is_switch(option):
                words[len(words) - (not name) :] = [
                    option if value.lower() == "true" else f"--no-{option[2:]}"
                ]
            else:
                words.append(f"{name}{equals}{value}")
        return [*words, *args[end:]]

    def _is_switch(self, option: str) -> bool:
        return isinstance(self._option_string_actions.get(option), argparse.BooleanOptionalAction)
