"""Agents that come with trouper, and how a configuration names one.

An agent is an async function of (conversation, world). It never sees an infrastructure failure and needs no exit
conditions of its own: `generate` ends the episode when turns or context are used up.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Literal

from trouper.channels import ConfigError, Message
from trouper.envs.calls import CallParser, hermes, plain
from trouper.envs.conversation import Conversation
from trouper.envs.dotted import load_object, made
from trouper.envs.protocols import Agent, World


async def model_agent(talk: Conversation, world: World) -> None:
    """The model acts, the world answers, until it is done."""
    talk.user(await world.reset())
    while not world.done:
        turn = await talk.generate()
        talk.user(await world.step(turn.text))


def prompted_agent(preamble: Sequence[dict[str, str]]) -> Agent:
    """`model_agent` after some messages of its own.

    Args:
        preamble: dicts with `role` and `content`: instructions and worked examples.
    """
    opening = _messages(preamble)

    async def agent(talk: Conversation, world: World) -> None:
        talk.extend(opening)
        await model_agent(talk, world)

    return agent


def tool_agent(
    syntax: Literal["hermes", "plain"] = "hermes",
    preamble: Sequence[dict[str, str]] = (),
    result_role: Literal["tool", "user"] = "tool",
    calls_in_thinking: bool = False,
    strict: bool = False,
) -> Agent:
    """An agent that runs the model's tool calls, in order, and gives each turn without a call to the world.

    A turn that was cut off makes no call: it goes to the world as it is.

    Args:
        syntax: how calls are written: `hermes`, or `plain`, a line such as `calc(12 * 7)` whose inside is the tool's
            first argument.
        preamble: dicts with `role` and `content`: instructions and worked examples.
        result_role: whose message a result is; `user` for models that never saw the role `tool`.
        calls_in_thinking: run calls from inside the thinking when there is none outside.
        strict: with `hermes`, one call to a block.

    Metrics: `tools/call_frequency`, calls of the episode; `tools/failure_frequency`, the part of them that failed or
    could not be read, where there were any.
    """
    opening = _messages(preamble)
    if syntax not in ("hermes", "plain"):
        raise ConfigError(f"syntax {syntax!r} is neither hermes nor plain")
    if result_role not in ("tool", "user"):
        raise ConfigError(f"result_role {result_role!r} is neither tool nor user")

    async def agent(talk: Conversation, world: World) -> None:
        talk.extend(opening)
        talk.tools = world.tools
        parser = hermes(strict=strict) if syntax == "hermes" else _plain(world)
        answer = talk.tool if result_role == "tool" else talk.user
        calls = failures = 0
        talk.metrics["tools/call_frequency"] = 0.0
        talk.user(await world.reset())
        while not world.done:
            turn = await talk.generate(parser, calls_in_thinking=calls_in_thinking)
            if not turn.calls and not turn.errors:
                talk.user(await world.step(turn.text))
                continue
            for call in turn.calls:
                result = await world.call(call.name, call.arguments)
                failures += result.failed
                answer(result.text)
            for error in turn.errors:
                answer(f"error: this call could not be read: {error.problem}")
            calls += len(turn.calls) + len(turn.errors)
            failures += len(turn.errors)
            talk.metrics["tools/call_frequency"] = float(calls)
            talk.metrics["tools/failure_frequency"] = failures / calls

    return agent


def load_agent(name: str, arguments: dict[str, Any]) -> Agent:
    """The agent a configuration names.

    Args:
        name: `module:attribute` of an agent (an async function), or of a factory that returns one.
        arguments: for the factory; an agent itself takes none.

    Raises:
        ConfigError: no such thing, or arguments that do not fit.
    """
    found = load_object(name)
    if not inspect.iscoroutinefunction(found):
        found = made(name, arguments)
        if not callable(found):
            raise ConfigError(f"{name!r} returned a {type(found).__name__}, not an agent: an async function")
    elif arguments:
        raise ConfigError(f"{name!r} is an agent and takes no arguments, but was given {sorted(arguments)}")
    agent: Agent = found
    return agent


def _plain(world: World) -> CallParser:
    return plain({tool.name: next(iter(tool.parameters["properties"]), "") for tool in world.tools})


def _messages(preamble: Sequence[dict[str, str]]) -> tuple[Message, ...]:
    for index, message in enumerate(preamble):
        if set(message) != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
            raise ConfigError(f"preamble[{index}] is {message!r}, not a role and a content, both strings")
    return tuple(Message(**message) for message in preamble)
