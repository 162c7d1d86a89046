"""A conversation in the terminal: its messages, and the commands that change it."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.cli.console.parser import UsageError
from pagewire.cli.console.terminal import show
from pagewire.ipc.bounds import unknown_name

if TYPE_CHECKING:
    from pagewire.ipc.wire.media import MediaInfo

HELP = {
    "/help": "list the commands",
    "/system [TEXT]": "show the system message, or set it",
    "/image FILE": "add a picture to the next message (a file or URL)",
    "/audio FILE": "add a sound to the next message",
    "/regenerate": "answer the last message again",
    "/tokens": "count the tokens of the conversation",
    "/save FILE": "write the conversation, as JSON",
    "/load FILE": "go on with a conversation that was saved",
    "/reset": "begin a new conversation",
    "/exit": "leave, as Ctrl-D does",
}
"""Commands, and what they do."""
NAMES = tuple(usage.split()[0] for usage in HELP)
KINDS = ("image", "audio")
NOTES = (
    'A message of several lines: a backslash at the end of each but the last, or a line of """ before and behind. '
    "// begins a message with /. Ctrl-C stops an answer."
)


class TypedConversation:
    """Messages as chat templates take them, and parts of the next one.

    system: the message that begins it; "": none. info: the media that the model takes.
    answer: answers messages; None: there is no answer. count: counts their tokens, and says how many there may be.
    """

    def __init__(
        self,
        system: str,
        info: MediaInfo | None,
        answer: Callable[[list[Any]], str | None],
        count: Callable[[list[Any]], tuple[int, int]],
    ) -> None:
        self.messages: list[dict[str, Any]] = []
        self.parts: list[dict[str, Any]] = []
        self.system, self._info = system, info
        self._answer, self._count = answer, count

    @property
    def all_messages(self) -> list[dict[str, Any]]:
        """The system message, if there is one, and the messages."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.messages

    def take(self, line: str) -> None:
        """Obey a command, or send a message. What is wrong with it is shown."""
        if not line.startswith("/") or line.startswith("//"):
            self.send(line.removeprefix("/") if line.startswith("//") else line)
            return
        name, _, argument = line.partition(" ")
        try:
            if name not in NAMES:
                raise UsageError(f"{unknown_name('command', name, NAMES)}; /help lists them")
            getattr(self, f"do_{name[1:]}")(argument.strip())
        except (UsageError, ValueError, OSError) as error:
            show(str(error))

    def send(self, text: str) -> None:
        """Send a message. One that is not answered is forgotten."""
        content = [*self.parts, {"type": "text", "text": text}] if self.parts else text
        self.messages.append({"role": "user", "content": content})
        self.parts = []
        if (answer := self._answer(self.all_messages)) is None:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer})

    def attach(self, kind: str, name: str) -> None:
        """Add a picture or sound to the next message. Raises UsageError: see `media_part`."""
        self.parts.append(media_part(kind, name, self._info))

    def do_help(self, _: str) -> None:
        """List the commands."""
        width = max(map(len, HELP)) + 2
        show("\n".join(f"{usage:{width}}{what}" for usage, what in HELP.items()) + f"\n{NOTES}")

    def do_system(self, text: str) -> None:
        """Set the system message, or show it."""
        if text:
            self.system = text
        show(self.system or "there is no system message: /system TEXT sets one")

    def do_image(self, name: str) -> None:
        """Add a picture."""
        self.attach("image", name)

    def do_audio(self, name: str) -> None:
        """Add a sound."""
        self.attach("audio", name)

    def do_regenerate(self, _: str) -> None:
        """Answer the last message again. The old answer stays if there is no new one."""
        if not self.messages:
            raise UsageError("there is no answer yet")
        if (answer := self._answer(self.all_messages[:-1])) is not None:
            self.messages[-1]["content"] = answer

    def do_tokens(self, _: str) -> None:
        """Count the tokens."""
        count, most = self._count(self.all_messages)
        show(f"{count} of {most} tokens")

    def do_save(self, name: str) -> None:
        """Write the messages into a file."""
        text = json.dumps(self.all_messages, ensure_ascii=False, indent=1, default=as_base64)
        path_of(name).write_text(text + "\n", encoding="utf-8")
        show(f"{len(self.messages)} messages are in {name}")

    def do_load(self, name: str) -> None:
        """Read messages from a file."""
        messages = checked(path_of(name).read_text(encoding="utf-8"), name)
        begins = bool(messages) and messages[0]["role"] == "system"
        self.system = str(messages.pop(0)["content"]) if begins else ""
        self.messages, self.parts = messages, []
        show(f"{len(messages)} messages were in {name}")

    def do_reset(self, _: str) -> None:
        """Begin anew."""
        self.messages, self.parts = [], []


def path_of(name: str) -> Path:
    """The path of a file that a command names. Raises UsageError: it names none."""
    if not name:
        raise UsageError("the name of a file is missing")
    return Path(name).expanduser()


def as_base64(content: bytes) -> str:
    """Bytes of a picture or sound as JSON has them."""
    return "data:;base64," + base64.b64encode(content).decode()


def checked(text: str, name: str) -> list[dict[str, Any]]:
    """The messages of a file. name: of the file.

    Raises:
        UsageError: it holds no conversation that ends with an answer.
    """
    try:
        messages = json.loads(text)
    except ValueError:
        messages = None
    roles = (
        [message.get("role") for message in messages if isinstance(message, dict)]
        if isinstance(messages, list)
        else []
    )
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if (
        not isinstance(messages, list)
        or len(roles) != len(messages)
        or talk != ["user", "assistant"] * (len(talk) // 2)
    ):
        raise UsageError(f"{name} holds no conversation that /save has written")
    if not all(isinstance(message.get("content"), str | list) for message in messages):
        raise UsageError(f"{name}: a message has no content")
    return messages


def media_part(kind: str, name: str, info: MediaInfo | None) -> dict[str, Any]:
    """A picture or sound as a part of a message. name: of a file, or a URL. info: what the model takes.

    Raises:
        UsageError: the model takes none, or the file cannot be read.
    """
    if info is None or kind not in info.kinds:
        raise UsageError(f"{kind}: the model takes no {'pictures' if kind == 'image' else 'sounds'}")
    if "://" in name or name.startswith("data:"):
        return {"type": f"{kind}_url", f"{kind}_url": {"url": name}}
    try:
        return {"type": kind, kind: path_of(name).read_bytes()}
    except OSError as error:
        raise UsageError(f"{kind}: {name}: {error.strerror}") from None
