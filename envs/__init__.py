"""Worlds, tools, agents and chat: everything that is text. No JAX; knows trouper.channels only."""

from trouper.envs.agents import load_agent, model_agent, prompted_agent, tool_agent
from trouper.envs.calls import CallParser, ParseError, ToolCall, hermes, parse_turn, plain
from trouper.envs.chat import Chat, PlainChat, TemplateChat, load_chat
from trouper.envs.conversation import Conversation, ConversationOver, ModelTurn, Sample
from trouper.envs.dotted import load_factory, load_object, made
from trouper.envs.protocols import (
    Agent,
    Environment,
    Invoke,
    StepResult,
    World,
    checked_observation,
    checked_score,
    checked_step,
    inline,
)
from trouper.envs.rewards import Rewards, Score, load_rewards
from trouper.envs.single_turn import SingleTurn
from trouper.envs.tasks import JsonlTasks, TaskList, Tasks, load_tasks
from trouper.envs.tools import Tool, ToolError, ToolResult, call_tool, tools_of

__all__ = [
    "Agent",
    "CallParser",
    "Chat",
    "Conversation",
    "ConversationOver",
    "Environment",
    "Invoke",
    "JsonlTasks",
    "ModelTurn",
    "ParseError",
    "PlainChat",
    "Rewards",
    "Sample",
    "Score",
    "SingleTurn",
    "StepResult",
    "TaskList",
    "Tasks",
    "TemplateChat",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "World",
    "call_tool",
    "checked_observation",
    "checked_score",
    "checked_step",
    "hermes",
    "inline",
    "load_agent",
    "load_chat",
    "load_factory",
    "load_object",
    "load_rewards",
    "load_tasks",
    "made",
    "model_agent",
    "parse_turn",
    "plain",
    "prompted_agent",
    "tool_agent",
    "tools_of",
]
