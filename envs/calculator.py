"""Sums that a small model cannot do in its head: it must call the calculator, read the result, and answer with it.

Questions are short and answers are a number, since on small machines the number of tokens is the cost of a run.
"""

import ast
import hashlib
import operator
import re
from typing import Any, Literal, TypeAlias

import numpy as np

from trouper.channels import ConfigError, Task
from trouper.envs.protocols import StepResult
from trouper.envs.tools import ToolError

Split: TypeAlias = Literal["train", "test"]

_WORDS = {"+": "plus", "*": "times"}
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_SIGNS = re.compile(r"[0-9+\-*() ]*")
_KNOWN = "only whole numbers, +, -, * and parentheses are known"
_LONGEST = 64
_CALLED = 0.2


def calculate(expression: str) -> int:
    """The value of an expression of whole numbers, `+`, `-`, `*` and parentheses.

    Raises:
        ToolError: anything else, or more than 64 characters.
    """
    if len(expression) > _LONGEST:
        raise ToolError(f"an expression has at most {_LONGEST} characters, this one {len(expression)}")
    if not _SIGNS.fullmatch(expression):
        raise ToolError(_KNOWN)
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        raise ToolError(f"cannot read {expression!r}; write it like 12*(3+4)") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value: int = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        return value
    raise ToolError(_KNOWN)


class Calculator:
    """The environment: one question, the tool `calc`, one answer that ends it.

    The score is 0.8 for an answer that is exactly the number, and 0.2 when the calculator showed that number: both
    are facts, so a part of a call or of an answer earns nothing.
    """

    def __init__(self) -> None:
        self.tools = (self.calc,)

    def reset(self, task: Task) -> str:
        """Ask."""
        self._answer: int = task.payload["answer"]
        self._shown = False
        self._right = False
        return str(task.payload["question"])

    def calc(self, expression: str) -> str:
        """Evaluate an expression of whole numbers, such as 12*34."""
        value = calculate(expression)
        self._shown = self._shown or value == self._answer
        return str(value)

    def step(self, action: str) -> StepResult:
        """Take the answer."""
        self._right = action.strip() == str(self._answer)
        metrics = {"calculator/right": float(self._right), "calculator/shown": float(self._shown)}
        return StepResult("", done=True, metrics=metrics)

    def reward(self) -> float:
        """The score so far."""
        return _CALLED * self._shown + (1 - _CALLED) * self._right


class CalculatorTasks:
    """Questions such as `What is 34 times 57?`, endless; the two splits share no question.

    Args:
        seed: of the questions.
        split: one question in ten is `test`, by a hash of its text; the others are `train`.
        operators: out of `+` and `*`.
        smallest: of an operand.
        largest: of an operand.

    Raises:
        ConfigError: an unknown split or operator, or no operands.
    """

    def __init__(self, seed: int, split: Split, operators: str, smallest: int, largest: int) -> None:
        if split not in ("train", "test"):
            raise ConfigError(f"split {split!r} is neither train nor test")
        if not operators or not set(operators) <= set(_WORDS):
            raise ConfigError(f"operators {operators!r} must be one or more of {' '.join(_WORDS)}")
        if largest - smallest < 9:
            raise ConfigError(f"operands from {smallest} to {largest} are fewer than 10: a split could be empty")
        self._seed = seed
        self._split = split
        self._operators = operators
        self._range = (smallest, largest + 1)

    def task(self, draw: int) -> Task:
        """The question of a draw number."""
        random = np.random.default_rng((self._seed, draw))
        while True:
            a, b = (int(number) for number in random.integers(*self._range, size=2))
            sign = self._operators[int(random.integers(len(self._operators)))]
            question = f"What is {a} {_WORDS[sign]} {b}?"
            if split_of(question) == self._split:
                return Task(f"{a}{sign}{b}", {"question": question, "answer": calculate(f"{a}{sign}{b}")})


def calculator_tasks(
    seed: int = 0, split: Split = "train", operators: str = "+*", smallest: int = 10, largest: int = 99
) -> CalculatorTasks:
    """The task stream for a configuration."""
    return CalculatorTasks(seed, split, operators, smallest, largest)


def split_of(question: str) -> Split:
    """Which split a question belongs to."""
    return "test" if hashlib.blake2b(question.encode(), digest_size=2).digest()[0] < 26 else "train"


_TIMES = ("What is 3 times 4?", "3*4", "12")
_PLUS = ("What is 25 plus 31?", "25+31", "56")


def _variant(syntax: str, system: str, *examples: tuple[str, str, str]) -> dict[str, Any]:
    preamble = [{"role": "system", "content": system}]
    for question, expression, result in examples:
        call = f"calc({expression})"
        if syntax == "hermes":
            call = f'<tool_call>\n{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
        spoken = (("user", question), ("assistant", call), ("tool", result), ("assistant", result))
        preamble += [{"role": role, "content": content} for role, content in spoken]
    return {"syntax": syntax, "preamble": preamble}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": _variant("plain", "Reply only with a calc call.", _PLUS),
    "plain-two": _variant("plain", "Use calc.", _TIMES, _PLUS),
    "hermes": _variant("hermes", "Use calc.", _TIMES, _PLUS),
}
"""Ways to ask a small chat model, by name: plain data, the arguments of `trouper.envs.agents:tool_agent`.

SmolLM2-135M-Instruct at temperature 1 with its first weights was right in 0.22 of the episodes with `plain` (76 prompt
tokens, 64 questions), in 0.53 with `plain-two` (111 tokens, 32 questions), in 0.12 with `hermes` (159 tokens, 32).
"""
