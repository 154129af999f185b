import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.envs import ToolCall, hermes, parse_turn, plain
from trouper.envs.calls import split_reasoning

DRAFT = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
THOUGHT = f"Maybe I should call it like {DRAFT} first."
REAL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADD = ToolCall("add", {"a": 2, "b": 3})
TWO = (
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n{"name": "f", "arguments": {"x": 2}}\n</tool_call>',
    (ToolCall("f", {"x": 1}), ToolCall("f", {"x": 2})),
)


def test_a_call_drafted_while_thinking_is_not_made():
    parsed = parse_turn(f"<think>\n{THOUGHT}\n</think>\n\n{REAL}", "stop", hermes())
    assert parsed.calls == (ADD,)
    assert parsed.reasoning == THOUGHT
    assert not parsed.errors


@pytest.mark.parametrize(
    ("text", "opened"),
    [
        (f"<think>a</think>\n<think>{THOUGHT}</think>\n{REAL}", False),
        (f"{REAL}\n<think>{THOUGHT}</think>\nSo.", False),
        (f"a</think>\n{REAL}<think>{THOUGHT}", True),
        (f"<think>a<think>b</think>{THOUGHT}</think>{REAL}", False),
        (f"I may use <tool_call> tags. {THOUGHT}</think>{REAL}", False),
    ],
    ids=["thinks twice", "thinks after", "thinks until cut", "nested", "names the tag"],
)
def test_no_thinking_of_a_turn_makes_a_call(text, opened):
    assert parse_turn(text, "stop", hermes(), opened=opened).calls == (ADD,)


@pytest.mark.parametrize("argument", ["<think>", "a </think> b", "<think>a</think>", "</tool_call><think>"])
@pytest.mark.parametrize("before", ["", "<think>a</think>\n", "Well.\n"])
def test_tags_of_thinking_inside_an_argument_are_text(argument, before):
    call = f'<tool_call>\n{{"name": "write", "arguments": {{"text": "{argument}"}}}}\n</tool_call>'
    assert parse_turn(before + call, "stop", hermes()).calls == (ToolCall("write", {"text": argument}),)


def test_a_draft_alone_is_no_call():
    parsed = parse_turn(f"<think>\n{THOUGHT}\n</think>\n\nDone.", "stop", hermes())
    assert parsed.calls == ()
    assert parsed.text == "Done."


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_thinking_that_never_closes_makes_no_call(finish):
    parsed = parse_turn(f"<think>\n{THOUGHT}", finish, hermes())
    assert (parsed.calls, parsed.errors, parsed.text) == ((), (), "")


@pytest.mark.parametrize("opened", [True, False])
def test_thinking_that_the_prompt_opened(opened):
    """One closing tag without an opening one says as much as the flag does."""
    parsed = parse_turn(f"{THOUGHT}\n</think>\n\n{REAL}", "stop", hermes(), opened=opened)
    assert parsed.calls == (ADD,)
    assert parsed.reasoning == THOUGHT


def test_opened_thinking_that_never_closes_makes_no_call():
    assert parse_turn(THOUGHT, "stop", hermes(), opened=True).calls == ()


def test_calls_in_thinking_count_when_asked_for_and_never_both():
    both = parse_turn(f"<think>{THOUGHT}</think>{REAL}", "stop", hermes(), calls_in_thinking=True)
    assert both.calls == (ADD,)
    inner = parse_turn(f"<think>{THOUGHT}</think>", "stop", hermes(), calls_in_thinking=True)
    assert inner.calls == (ToolCall("add", {"a": 1, "b": 1}),)


def test_two_objects_in_one_block_are_two_calls():
    text, calls = TWO
    assert parse_turn(text, "stop", hermes()).calls == calls


def test_two_objects_in_one_block_are_one_error_when_strict():
    parsed = parse_turn(TWO[0], "stop", hermes(strict=True))
    assert parsed.calls == ()
    assert len(parsed.errors) == 1
    assert "2 objects" in parsed.errors[0].problem


CUT = (
    '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "write", "arguments": {"text": "hel'
)


def test_a_turn_that_was_cut_off_makes_no_call_and_no_mistake():
    parsed = parse_turn(CUT, "length", hermes())
    assert (parsed.calls, parsed.errors) == ((), ())


def test_the_same_text_ended_by_the_model_is_one_call_and_one_mistake():
    parsed = parse_turn(CUT, "stop", hermes())
    assert parsed.calls == (ToolCall("a", {}),)
    assert len(parsed.errors) == 1


def test_tags_and_braces_inside_strings_are_text():
    text = '<tool_call>{"name": "say", "arguments": {"t": "}</tool_call>{<tool_call>"}}</tool_call> then'
    assert parse_turn(text, "stop", hermes()).calls == (ToolCall("say", {"t": "}</tool_call>{<tool_call>"}),)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"city": "Paris"}', {"city": "Paris"}),
        ('"{\\"city\\": \\"Paris\\"}"', {"city": "Paris"}),
        ('""', {}),
        ("null", {}),
    ],
)
def test_shapes_of_arguments(arguments, expected):
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse_turn(text, "stop", hermes(strict=True)).calls == (ToolCall("f", expected),)


@pytest.mark.parametrize(
    "block",
    ["", "[1]", '{"arguments": {}}', '{"name": "f", "arguments": [1]}', '{"name": 3}', "{bad", "[" * 100_000],
)
@pytest.mark.parametrize("strict", [False, True])
def test_malformed_blocks_are_records(block, strict):
    parsed = parse_turn(f"<tool_call>{block}</tool_call>{REAL}", "stop", hermes(strict=strict))
    assert parsed.calls == (ADD,)
    assert len(parsed.errors) == 1


def test_a_complete_object_without_its_end_tag():
    text = REAL.removesuffix("\n</tool_call>")
    assert parse_turn(text, "stop", hermes()).calls == (ADD,)
    assert parse_turn(text, "stop", hermes(strict=True)).calls == ()


def test_plain_calls_stand_on_lines_of_their_own():
    text = "I will use it.\ncalc(12 * (7 + 1))\nsin(3)\n  calc( 2 )  \nthen calc(4)"
    parsed = parse_turn(text, "stop", plain({"calc": "expression"}))
    assert parsed.calls == (ToolCall("calc", {"expression": "12 * (7 + 1)"}), ToolCall("calc", {"expression": "2"}))
    assert parsed.errors == ()


@pytest.mark.parametrize("line", ["calc(1", "calc(1) = 1", "calc(1)calc(2)", "calc((1)"])
def test_a_line_that_only_begins_like_a_call_is_a_mistake(line):
    parsed = parse_turn(line, "stop", plain({"calc": "expression"}))
    assert parsed.calls == ()
    assert len(parsed.errors) == 1


def test_no_tools_means_no_plain_calls():
    assert parse_turn("calc(1)", "stop", plain({})).calls == ()


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f"', "}", '"', "calc(", ")", "\n", "x", DRAFT]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.booleans(), st.booleans())
@settings(deadline=None)
def test_nothing_a_model_says_raises(text, opened, strict):
    for parser in (hermes(strict=strict), plain({"calc": "e"})):
        cut = parse_turn(text, "length", parser, opened=opened)
        assert (cut.calls, cut.errors) == ((), ())
        reasoning, said = split_reasoning(text, opened=opened)
        parsed = parse_turn(text, "stop", parser, opened=opened)
        assert (parsed.reasoning, parsed.text) == (reasoning, said)
        assert parsed.calls == parser(said)[0]
