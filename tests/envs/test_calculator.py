import pytest

from trouper.channels import ConfigError, Task
from trouper.envs import ToolError, tool_agent, tools_of
from trouper.envs.calculator import VARIANTS, Calculator, calculate, calculator_tasks, split_of

TASK = Task("12*34", {"question": "What is 12 times 34?", "answer": 408})


@pytest.mark.parametrize(
    ("expression", "value"),
    [("12*34", 408), (" 12 + 34 ", 46), ("-(2-5)*(3+4)", 21), ("9" * 64, int("9" * 64))],
)
def test_sums(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1_0",
        "007",
        "'\\d'",
        "1\n",
        "",
        "12*",
        "2**9",
        "1/2",
        "1.5",
        "True",
        "x",
        "f(1)",
        "'a'*9",
        "9" * 65,
        "(" * 60,
        "1\0",
        "0x",
        "__import__('os')",
    ],
)
def test_what_is_no_sum(expression):
    with pytest.raises(ToolError):
        calculate(expression)


@pytest.mark.parametrize(
    ("expressions", "answer", "reward"),
    [
        (["12*34"], "408", 1.0),
        (["12*34"], " 408\n", 1.0),
        (["12*34"], "It is 408.", 0.2),
        (["12*35"], "408", 0.8),
        (["12*35"], "420", 0.0),
        (["12*35", "12*34"], "408", 1.0),
        ([], "408", 0.8),
        ([], "calc(12*34)", 0.0),
    ],
)
def test_score(expressions, answer, reward):
    world = Calculator()
    assert world.reset(TASK) == "What is 12 times 34?"
    for expression in expressions:
        world.calc(expression)
    assert world.step(answer).done
    assert world.reward() == pytest.approx(reward)


def test_a_new_question_forgets_the_last():
    world = Calculator()
    world.reset(TASK)
    world.calc("12*34")
    world.step("408")
    world.reset(TASK)
    assert world.reward() == 0.0


def test_the_tool_is_described():
    (tool,) = tools_of(Calculator())
    assert tool.name == "calc"
    assert tool.parameters["required"] == ["expression"]


def test_questions_are_a_pure_function_of_the_draw_and_the_splits_share_none():
    train = {calculator_tasks(1).task(draw).payload["question"] for draw in range(2000)}
    test = {calculator_tasks(2, "test").task(draw).payload["question"] for draw in range(500)}
    assert not train & test
    assert {split_of(question) for question in train} == {"train"}
    assert calculator_tasks(1).task(7) == calculator_tasks(1).task(7) != calculator_tasks(2).task(7)


def test_answers_are_right():
    for draw in range(50):
        task = calculator_tasks(3, operators="*", smallest=10, largest=99).task(draw)
        left, right = map(int, task.id.split("*"))
        assert task.payload["answer"] == left * right
        assert task.payload["question"] == f"What is {left} times {right}?"


@pytest.mark.parametrize("arguments", [{"split": "dev"}, {"operators": "/"}, {"operators": ""}, {"largest": 12}])
def test_streams_that_cannot_be(arguments):
    with pytest.raises(ConfigError):
        calculator_tasks(**arguments)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_are_arguments_of_the_tool_agent(name):
    tool_agent(**VARIANTS[name])
