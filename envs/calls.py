"""Tool calls in a model's text: which part was thinking, which calls were made, which were malformed.

Works on the text of one whole sampled turn and its finish reason, never on observations. Never raises: what cannot be
read becomes a `ParseError` record.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from msgspec import Struct

from trouper.channels import FinishReason

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_SPACE, _NEWLINES = re.compile(r"\s*"), re.compile(r"\n*")
_TAG, _CLOSING = re.compile(f"{_THINK}|{_END_THINK}|{_CALL}"), re.compile(_END_THINK)


class ToolCall(Struct, frozen=True):
    """One call the model made.

    Attributes:
        name: of the tool.
        arguments: by parameter name.
    """

    name: str
    arguments: dict[str, Any]


class ParseError(Struct, frozen=True):
    """A call that could not be read.

    Attributes:
        text: the part of the turn it stands in.
        problem: what is wrong with it.
    """

    text: str
    problem: str


Calls: TypeAlias = tuple[tuple[ToolCall, ...], tuple[ParseError, ...]]
CallParser: TypeAlias = Callable[[str], Calls]
"""Text without thinking -> the calls in their order, and the malformed ones."""


class Parsed(Struct, frozen=True):
    """One turn's text, taken apart.

    Attributes:
        text: what was said outside the thinking.
        reasoning: the thinking, or None where there was none.
        calls: to be executed, in order; empty when the turn was cut off.
        errors: malformed calls; empty when the turn was cut off, since an unfinished call is no mistake.
    """

    text: str
    reasoning: str | None
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()


def parse_turn(
    text: str,
    finish: FinishReason,
    parser: CallParser | None = None,
    *,
    opened: bool = False,
    calls_in_thinking: bool = False,
) -> Parsed:
    """Take a turn apart.

    Args:
        text: the whole sampled text, end token left out.
        finish: `length` makes every call of the turn void: it was one unfinished batch.
        parser: how calls are written; None looks for none.
        opened: the prompt itself ended with `<think>`, so the text begins inside the thinking.
        calls_in_thinking: for models that call from inside their thinking: when there is no call outside, those inside
            count. Never both.
    """
    reasoning, said = split_reasoning(text, opened=opened)
    if parser is None or finish == "length":
        return Parsed(said, reasoning)
    calls, errors = parser(said)
    if calls_in_thinking and not calls and reasoning:
        calls, errors = parser(reasoning)
    return Parsed(said, reasoning, calls, errors)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """(thinking or None, the rest). A turn may think more than once; all of its thinking is taken out.

    Thinking that never closes takes everything that follows it. A closing tag without an opening one makes thinking of
    what stands before it, back to the last thinking: in doubt nothing is executed. Tags inside a readable tool call
    are text of its arguments.
    """
    said: list[str] = []
    thought: list[str] = []
    at = len(_THINK) if opened and text.startswith(_THINK) else 0
    inside = opened
    while True:
        tag = _CLOSING.search(text, at) if inside else _next_tag(text, at)
        (thought if inside or (tag and tag[0] == _END_THINK) else said).append(text[at : tag.start() if tag else None])
        if tag is None:
            break
        inside = tag[0] == _THINK
        at = tag.end() if inside else _end(_NEWLINES, text, tag.end())
    return "\n".join(part.strip("\n") for part in thought) if thought else None, "".join(said)


def _next_tag(text: str, at: int) -> re.Match[str] | None:
    """The next tag of thinking outside the tool calls that can be read."""
    while tag := _TAG.search(text, at):
        if tag[0] != _CALL:
            return tag
        _, problem, end = _block(text, tag.end())
        at = tag.end() if problem else end
    return None


def hermes(*, strict: bool = False) -> CallParser:
    r"""The Hermes and Qwen form, `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`.

    Args:
        strict: a block holds exactly one object and its end tag, else it is one `ParseError` and no call. Without it,
            every object of a block is a call, and a complete object whose end tag is missing counts.
    """

    def parse(text: str) -> Calls:
        calls: list[ToolCall] = []
        errors: list[ParseError] = []
        at = text.find(_CALL)
        while at >= 0:
            found, problem, end = _block(text, at + len(_CALL))
            if strict and problem is None:
                if len(found) != 1:
                    problem = f"{len(found)} objects in one block"
                elif not text.startswith(_END_CALL, end):
                    problem = f"no {_END_CALL}"
            if not (strict and problem):
                calls += found
            if problem:
                errors.append(ParseError(text[at:end], problem))
            at = text.find(_CALL, end)
        return tuple(calls), tuple(errors)

    return parse


def _block(text: str, at: int) -> tuple[list[ToolCall], str | None, int]:
    """(calls, first problem or None, where the block ends). Objects are read as JSON: a tag in a string is text."""
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    while True:
        at = _end(_SPACE, text, at)
        if at == len(text) or text.startswith(_END_CALL, at):
            return calls, None if calls else "an empty block", at
        try:
            value, after = decoder.raw_decode(text, at)
            calls.append(_call(value))
        except (ValueError, RecursionError) as error:
            end = text.find(_END_CALL, at)
            return calls, str(error), end if end >= 0 else len(text)
        at = after


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _call(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("not an object with a name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str) and arguments:
        # Some models write the arguments as a JSON string, as the OpenAI format does.
        arguments = json.loads(arguments)
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments are a {type(arguments).__name__}, not an object")
    return ToolCall(value["name"], arguments)


def plain(names: Mapping[str, str]) -> CallParser:
    """The shortest form, for small models: a line that is a call and nothing else, as in `calc(12 * 7)`.

    Args:
        names: tool name -> the parameter that the text between the parentheses is given as.

    A line that begins like a call but is not one is a `ParseError`; every other line is text.
    """
    start = re.compile("(" + "|".join(map(re.escape, names)) + r")\((.*)") if names else None

    def parse(text: str) -> Calls:
        calls: list[ToolCall] = []
        errors: list[ParseError] = []
        for line in text.splitlines():
            match = start.fullmatch(line.strip()) if start else None
            if match is None:
                continue
            name, rest = match.groups()
            if _closes_at_end(rest):
                calls.append(ToolCall(name, {names[name]: rest[:-1].strip()}))
            else:
                errors.append(ParseError(line, f"a call is {name}(...) on a line of its own"))
        return tuple(calls), tuple(errors)

    return parse


def _closes_at_end(rest: str) -> bool:
    depth = 1
    for index, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return index == len(rest) - 1
    return False
