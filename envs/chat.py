"""The only place where text becomes token ids: prompts, what is appended between two turns, stop ids.

Sampled ids are never decoded and encoded again. What follows a sampled turn is found by rendering the whole
conversation with a mark in that turn's place: the text after the mark is what the template puts there, whatever it
does to the messages before. Content cannot make control tokens: where it spells one, that piece is encoded apart, as
plain text; everything else of a rendering is encoded in one piece, as Hugging Face does it.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray

from trouper.channels import ChatError, Message
from trouper.envs.template import CHATML, RAW, Template
from trouper.envs.tools import Tool

Ids = NDArray[np.int32]

# Private-use characters stand for what must not be read as template text: a control token that content spells, and
# the end of the turn that is continued. One that content itself contains is treated like a control token.
_OPEN, _CLOSE = "\ue000", "\ue001"
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
_MARK = f"{_OPEN}here{_CLOSE}"


class Chat(Protocol):
    """How a model's conversations are written in token ids.

    Attributes:
        vocab_size: ids are below it; a model may have more rows.
        stop_ids: every id that ends a turn.
        prefix_preserving: a conversation's ids begin with the ids of its earlier turns, proved when it was loaded.
        reason: where not, what differed first.
        opens_thinking: the prompt itself opens a thinking block.
    """

    vocab_size: int
    stop_ids: tuple[int, ...]
    prefix_preserving: bool
    reason: str
    opens_thinking: bool

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Ids:
        """int32 [n]: the whole conversation, ready for the assistant to speak."""

    def continuation(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool] = (), *, ended: bool) -> Ids:
        """int32 [n]: what follows `messages[turn]`, up to where the assistant speaks again.

        Args:
            messages: the whole conversation.
            turn: index of the sampled message that is continued.
            tools: as in the prompt.
            ended: a stop id was sampled, so the template's own end token is left out.
        """

    def rewrites(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool] = ()) -> bool:
        """Whether the template now writes `messages[: turn + 1]` otherwise than when that turn was sampled."""

    def decode(self, ids: Ids) -> str:
        """Text of ids, control tokens included."""

    def text(self, ids: Ids) -> str:
        """Text of a sampled turn, its end token left out."""


class PlainChat:
    """One id per character, no roles: for models trained from scratch. Messages are joined as they are.

    The stop character is part of a turn's text, as every character of a plain format is.

    Args:
        alphabet: character `i` has id `i`.
        stop: characters that end a turn.

    Raises:
        ChatError: a character occurs twice, or a stop character is not in the alphabet.
    """

    prefix_preserving = True
    reason = ""
    opens_thinking = False

    def __init__(self, alphabet: str, stop: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet):
            raise ChatError(f"the alphabet {alphabet!r} must hold at least one character, and each only once")
        if not stop or not set(stop) <= set(alphabet):
            raise ChatError(f"stop {stop!r} must be one or more characters of the alphabet {alphabet!r}")
        self._alphabet = alphabet
        self._ids = {character: index for index, character in enumerate(alphabet)}
        self.vocab_size = len(alphabet)
        self.stop_ids = tuple(self._ids[character] for character in stop)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Ids:
        """int32 [n]: one id per character of all messages. Tools cannot be shown."""
        return self._encode("".join(message.content for message in messages))

    def continuation(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool] = (), *, ended: bool) -> Ids:
        """int32 [n]: one id per character of the messages after `turn`."""
        return self._encode("".join(message.content for message in messages[turn + 1 :]))

    def rewrites(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool] = ()) -> bool:
        """Never."""
        return False

    def decode(self, ids: Ids) -> str:
        """One character per id; an id beyond the alphabet, which a padded model can sample, gives U+FFFD."""
        return "".join(self._alphabet[i] if i < self.vocab_size else "\N{REPLACEMENT CHARACTER}" for i in ids.tolist())

    def text(self, ids: Ids) -> str:
        """All of it, stop character included."""
        return self.decode(ids)

    def _encode(self, text: str) -> Ids:
        try:
            return np.array([self._ids[character] for character in text], np.int32)
        except KeyError as error:
            raise ChatError(f"the alphabet {self._alphabet!r} has no {error.args[0]!r}, which {text!r} holds") from None


class TemplateChat:
    """A Hugging Face tokenizer and a chat template.

    Args:
        tokenizer: of the model.
        template: of the model.
        stop_ids: ids that end a turn; the token that the template itself ends an assistant message with is added.
        bos_id: id put in front of a row whose rendering does not begin with it; None puts nothing.

    Raises:
        ChatError: the template cannot write a user and an assistant message, or no id ends a turn.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: Template, stop_ids: tuple[int, ...], bos_id: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._bos_id = bos_id
        self._end: set[int] = set()
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(index for index, token in added.items() if token.special)
        control = sorted((token.content for token in added.values() if token.special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, [*control, _OPEN])))
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.opens_thinking = self._render([_USER], ()).rstrip().endswith("<think>")
        tail = self.continuation([_USER, _SHORT, _USER], 1, ended=False)
        # The sampler must stop where the template ends a turn, even if the model's files forgot to say so.
        self._end = {int(index) for index in tail[:1] if index in self._special or index in stop_ids}
        self.stop_ids = tuple(dict.fromkeys((*stop_ids, *self._end)))
        if not self.stop_ids:
            raise ChatError(f"{template.origin} names no end token: set eos_token_id in generation_config.json")
        self.reason = self._first_difference()
        self.prefix_preserving = not self.reason

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Ids:
        """int32 [n]: the whole conversation, ready for the assistant to speak; one BOS where the model wants one."""
        ids = self._encode(*self._guarded(messages, tools))
        if self._bos_id is not None and (not ids.size or ids[0] != self._bos_id):
            return np.concatenate([np.array([self._bos_id], np.int32), ids])
        return ids

    def continuation(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool] = (), *, ended: bool) -> Ids:
        """int32 [n]: end of `messages[turn]` (its end token only if it was not sampled), new messages, next opening."""
        rendered, literals = self._guarded(messages, tools, mark=turn)
        ids = self._encode(rendered.partition(_MARK)[2], literals)
        return ids[1:] if ended and ids.size and int(ids[0]) in self._end else ids

    def rewrites(self, messages: Sequence[Message], turn: int, tools: Sequence[Tool] = ()) -> bool:
        """Whether earlier prompt + sampled text is no longer how the template's rendering begins."""
        return not self._render(messages, tools).startswith(
            self._render(messages[:turn], tools) + messages[turn].content
        )

    def decode(self, ids: Ids) -> str:
        """Text of ids, control tokens included; an id that the tokenizer does not know gives nothing."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def text(self, ids: Ids) -> str:
        """Text of a sampled turn without the stop id it may end with."""
        return self.decode(ids[:-1] if ids.size and int(ids[-1]) in self.stop_ids else ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return self._template.render(
            [{"role": message.role, "content": message.content} for message in messages],
            [tool.schema() for tool in tools],
            generate=True,
        )

    def _guarded(self, messages: Sequence[Message], tools: Sequence[Tool], mark: int = -1) -> tuple[str, list[str]]:
        """The rendering with stand-ins for control tokens that contents spell, and what each stands for."""
        literals: list[str] = []

        def stand_in(match: re.Match[str]) -> str:
            literals.append(match.group())
            return f"{_OPEN}{len(literals) - 1}{_CLOSE}"

        guarded = [
            Message(message.role, _MARK if index == mark else self._control.sub(stand_in, message.content))
            for index, message in enumerate(messages)
        ]
        rendered = self._render(guarded, tools)
        if mark >= 0 and rendered.count(_MARK) != 1:
            raise ChatError(
                f"the chat template of {self._template.origin} writes an assistant message "
                f"{rendered.count(_MARK)} times; nothing can be appended after it"
            )
        return rendered, literals

    def _encode(self, rendered: str, literals: list[str]) -> Ids:
        ids: list[int] = []
        for index, piece in enumerate(_STAND_IN.split(rendered)):
            tokenizer, text = (self._blind, literals[int(piece)]) if index % 2 else (self._tokenizer, piece)
            ids += tokenizer.encode(text, add_special_tokens=False).ids
        return np.array(ids, np.int32)

    @cached_property
    def _blind(self) -> tokenizers.Tokenizer:
        """The same tokenizer with no eye for special tokens; a copy, since the switch is the object's own state."""
        blind = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        blind.encode_special_tokens = True
        return blind

    def _first_difference(self) -> str:
        """Play a battery of conversations; what first differs, on ids, between appending and rendering anew."""
        for messages in _BATTERY:
            turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
            try:
                row = self.prompt(messages[: turns[0]])
                for turn, after in zip(turns, [*turns[1:], len(messages)], strict=True):
                    said = self._encode(messages[turn].content, [])
                    row = np.concatenate([row, said, self.continuation(messages[:after], turn, ended=False)])
                    whole = self.prompt(messages[:after])
                    if not np.array_equal(row, whole):
                        return self._difference(messages[:after], row, whole)
            except ChatError:
                continue  # A template may refuse a role; a conversation that needs it fails by name when it is used.
        return ""

    def _difference(self, messages: Sequence[Message], row: Ids, whole: Ids) -> str:
        both = min(len(row), len(whole))
        differ = np.flatnonzero(row[:both] != whole[:both])
        at = int(differ[0]) if differ.size else both
        return (
            f"after {' / '.join(message.role for message in messages)} the template writes "
            f"{self.decode(whole[at : at + 8])!r} at token {at}, where {self.decode(row[at : at + 8])!r} was sampled"
        )


_USER = Message("user", "Add 2 and 3.")
_SHORT = Message("assistant", "It is 5.")
_THOUGHT = Message("assistant", "<think>\n2 + 3 = 5\n</think>\n\nIt is 5.")
_TOOL = Message("tool", "5")
_SYSTEM = Message("system", "Be brief.")
_BATTERY: tuple[tuple[Message, ...], ...] = (
    (_USER, _SHORT, _USER),
    (_SYSTEM, _USER, _SHORT, _USER, _SHORT, _USER),
    (_USER, _SHORT, _TOOL, _SHORT, _USER),
    (_USER, _THOUGHT, _USER, _THOUGHT, _USER),
    (_USER, _THOUGHT, _TOOL, _THOUGHT, _USER),
)


def load_chat(folder: Path, *, format: str = "auto") -> TemplateChat:  # the configuration's key
    """The chat format of a Hugging Face model folder.

    Args:
        folder: holds `tokenizer.json`, and where the model has them `tokenizer_config.json`, `chat_template.jinja`,
            `config.json` and `generation_config.json`. Ids that end a turn are gathered from all of these.
        format: `auto` uses the model's own template, `chatml` the ChatML form where it has none, `plain` joins
            messages as they are, for base models.

    Raises:
        ChatError: a file is missing or broken, or there is no template.
    """
    if format not in ("auto", "chatml", "plain"):
        raise ChatError(f"chat format {format!r} is none of auto, chatml, plain")
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ChatError(f"{path} does not exist; a chat model's folder holds its tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The Rust library raises bare Exception for every fault of the file.
        raise ChatError(f"{path} is no tokenizer: {error}") from error
    settings = _json(folder / "tokenizer_config.json")
    tokens = {key: _token_text(value) for key, value in settings.items() if key.endswith("_token")}
    names = {key: text for key, text in tokens.items() if text is not None}
    own = _template_source(folder, settings)
    if format == "plain":
        source = RAW
    elif own is None and format == "auto":
        raise ChatError(f"{folder} has no chat template; set chat format to chatml, or to plain for a base model")
    else:
        source = own if own is not None else CHATML
    return TemplateChat(
        tokenizer,
        Template(source, names, str(folder)),
        stop_ids=_stop_ids(folder, tokenizer, names.get("eos_token")),
        bos_id=_bos_id(tokenizer, settings, names.get("bos_token")),
    )


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    return source if isinstance(source, str) else None


def _stop_ids(folder: Path, tokenizer: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        found += [] if ids is None else [ids] if isinstance(ids, int) else ids
    eos_id = None if eos_token is None else tokenizer.token_to_id(eos_token)
    return tuple(dict.fromkeys(found if eos_id is None else [*found, eos_id]))


def _bos_id(tokenizer: tokenizers.Tokenizer, settings: dict[str, Any], bos_token: str | None) -> int | None:
    """The BOS id, if this tokenizer puts one in front of a text."""
    bos_id = None if bos_token is None else tokenizer.token_to_id(bos_token)
    if bos_id is None:
        return None
    adds = tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id]
    return bos_id if adds or settings.get("add_bos_token") is True else None


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as a dict with `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChatError(f"{path} holds a {type(value).__name__}, not an object")
    return value
