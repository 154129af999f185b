from typing import Literal

import numpy as np
import pytest

from trouper.channels import EnvironmentFailure
from trouper.envs import Tool, ToolError, ToolResult, call_tool, inline, tools_of


class Shop:
    def __init__(self):
        self.stock = 3
        self.tools = (self.buy, self.look, self.divide, self.broken, self.odd)

    def buy(self, count: int, colour: Literal["red", "blue"] = "red", note: str | None = None) -> str:
        """Buy some.

        More words.
        """
        if count > self.stock:
            raise ToolError(f"only {self.stock} are left")
        self.stock -= count
        return f"{count} {colour}"

    async def look(self, words: list[str]) -> dict:
        return {"found": words, "é": np.float64(1).item()}

    def divide(self, a: float, b: float) -> np.float64:
        return np.float64(a / b)

    def broken(self):
        raise OSError("the disk is full")

    def odd(self):
        return object()


def test_tools_are_described_by_their_signature():
    buy, look, *_ = tools_of(Shop())
    assert buy == Tool(
        "buy",
        "Buy some.",
        {
            "type": "object",
            "properties": {
                "count": {"type": "integer"},
                "colour": {"enum": ["red", "blue"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["count"],
        },
    )
    assert look.parameters["properties"] == {"words": {"type": "array", "items": {"type": "string"}}}
    assert look.schema()["function"]["name"] == "look"
    assert tools_of(object()) == ()


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("buy", {"count": 2, "colour": "blue"}, ToolResult("2 blue")),
        ("look", {"words": ["a"]}, ToolResult('{"found": ["a"], "é": 1.0}')),
        ("divide", {"a": 1, "b": 4}, ToolResult("0.25")),
        ("buy", {"count": 9}, ToolResult("error: only 3 are left", failed=True)),
        ("buy", {"count": "two"}, ToolResult(
            "error: TypeError: '>' not supported between instances of 'str' and 'int'", failed=True
        )),
        ("buy", {}, ToolResult("error: buy: missing a required argument: 'count'", failed=True)),
        ("buy", {"n": 1}, ToolResult("error: buy: missing a required argument: 'count'", failed=True)),
        ("divide", {"a": 1, "b": 0}, ToolResult("error: ZeroDivisionError: division by zero", failed=True)),
        ("sell", {}, ToolResult(
            "error: there is no tool 'sell'; there is: buy, look, divide, broken, odd", failed=True
        )),
    ],
)  # fmt: skip
async def test_a_call_gives_text_whatever_the_model_asked(name, arguments, expected):
    assert await call_tool(Shop(), name, arguments, inline) == expected


async def test_a_tool_that_breaks_is_not_the_models_fault():
    with pytest.raises(OSError, match="disk"):
        await call_tool(Shop(), "broken", {}, inline)
    with pytest.raises(EnvironmentFailure, match="Shop: tool 'odd' returned a object"):
        await call_tool(Shop(), "odd", {}, inline)


async def test_an_environment_without_tools():
    result = await call_tool(object(), "f", {}, inline)
    assert result == ToolResult("error: there is no tool 'f'; there is: none", failed=True)
