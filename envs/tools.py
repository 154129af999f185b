"""Tools: functions of an environment that the model may call, their JSON schemas, and what a call gives back.

Does not know how a call is written in text (`calls.py`) nor who runs it (the environment's actor).
"""

import functools
import inspect
import json
import types
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from msgspec import Struct

from trouper.channels import EnvironmentFailure

ARGUMENT_FAULTS: tuple[type[Exception], ...] = (ArithmeticError, LookupError, TypeError, ValueError)
"""Errors of a tool that are about what the model asked for: it reads them. Any other is the environment's failure."""


class ToolError(ValueError):
    """Raised by a tool to tell the model, in words, what is wrong with its call."""


class Tool(Struct, frozen=True):
    """What the model is told about one tool.

    Attributes:
        name: how it is called.
        description: the first paragraph of its docstring.
        parameters: JSON schema of its arguments, an object.
    """

    name: str
    description: str
    parameters: dict[str, Any]

    def schema(self) -> dict[str, Any]:
        """The form chat templates expect in `tools`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class ToolResult(Struct, frozen=True):
    """What the model reads after a call.

    Attributes:
        text: the result, or `error: ...`.
        failed: whether the call was at fault.
    """

    text: str
    failed: bool = False


def tools_of(environment: Any) -> tuple[Tool, ...]:
    """Descriptions of an environment's `tools`, in their order; empty where it has none."""
    return tuple(_described(function) for function in getattr(environment, "tools", ()))


async def call_tool(
    environment: Any,
    name: str,
    arguments: dict[str, Any],
    invoke: Callable[[Callable[[], Any]], Awaitable[Any]],
) -> ToolResult:
    """Call one of an environment's tools.

    Args:
        environment: its `tools` are looked through for `name`.
        name: which one.
        arguments: by parameter name.
        invoke: runs the bound function, plain or async; `trouper.envs.inline` is the simplest.

    Returns:
        The result as text. An unknown name, arguments that do not fit and the errors of `ARGUMENT_FAULTS` are failed
        results; any other error of the tool is raised, since the model cannot have caused it.
    """
    tools = {function.__name__: function for function in getattr(environment, "tools", ())}
    if name not in tools:
        known = ", ".join(tools) or "none"
        return ToolResult(f"error: there is no tool {name!r}; there is: {known}", failed=True)
    function = tools[name]
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return ToolResult(f"error: {name}: {error}", failed=True)
    try:
        value = await invoke(functools.partial(function, **arguments))
    except ARGUMENT_FAULTS as error:
        return ToolResult(f"error: {error}" if isinstance(error, ToolError) else _named(error), failed=True)
    return ToolResult(_as_text(environment, name, value))


def _named(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}"


def _as_text(environment: Any, name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        owner = type(environment).__qualname__
        raise EnvironmentFailure(
            "env_error",
            f"{owner}: tool {name!r} returned a {type(value).__name__}; return text or JSON values, "
            "since a language model reads it",
        ) from None


def _described(function: Callable[..., Any]) -> Tool:
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        properties[parameter.name] = _json_type(hints.get(parameter.name, Any))
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    return Tool(
        name=function.__name__,
        description=(inspect.getdoc(function) or "").split("\n\n")[0],
        parameters={"type": "object", "properties": properties, "required": required},
    )


_JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def _json_type(hint: Any) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_json_type(option) for option in inner]}
    if hint is type(None):
        return {"type": "null"}
    if origin is list and inner:
        return {"type": "array", "items": _json_type(inner[0])}
    name = _JSON_TYPES.get(origin or hint)
    return {"type": name} if name else {}
