import pytest

from trouper.channels import ConfigError, Task
from trouper.envs import (
    ConversationOver,
    PlainChat,
    StepResult,
    load_agent,
    load_chat,
    model_agent,
    prompted_agent,
    tool_agent,
)
from trouper.envs.calculator import VARIANTS, Calculator
from trouper.envs.guess import ALPHABET, STOP, Guess

QUESTION = Task("12*34", {"question": "What is 12 times 34?", "answer": 408})


def ids(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


async def test_the_model_plays_until_the_world_is_done(script, sampled, conversation, local_world):
    world = local_world(Guess(), Task("t", {"secret": 3}))
    sample = script(*(sampled(ids(text)) for text in ("5;", "2;", "3;")))
    talk = conversation(PlainChat(ALPHABET, STOP), sample, max_context=16, max_response_tokens=2, max_turns=5)
    await model_agent(talk, world)
    assert world.score() == pytest.approx(0.8)
    (row,) = talk.rows()
    assert row.tokens.tolist() == ids("?5;<2;>3;")
    assert row.loss_mask.astype(int).tolist() == [0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert talk.status == "done"


async def test_the_end_of_the_context_passes_through_an_agent(script, sampled, conversation, local_world):
    talk = conversation(PlainChat(ALPHABET, STOP), script(sampled(ids("5;"))), max_context=4)
    with pytest.raises(ConversationOver):
        await model_agent(talk, local_world(Guess(), Task("t", {"secret": 3})))
    assert talk.status == "context_overflow"


async def test_a_call_is_made_and_its_result_answered(chatml, speak, conversation, local_world):
    world = local_world(Calculator(), QUESTION)
    talk = conversation(chatml, speak("calc(12*34)", "408"))
    await tool_agent(**VARIANTS["plain"])(talk, world)
    assert world.score() == pytest.approx(1.0)
    assert world.metrics == {"calculator/right": 1.0, "calculator/shown": 1.0}
    assert talk.metrics == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.0}
    roles, contents = zip(*((message.role, message.content) for message in talk.messages[-5:]), strict=True)
    assert roles == ("user", "assistant", "tool", "assistant", "user")
    assert contents == (QUESTION.payload["question"], "calc(12*34)", "408", "408", "")


async def test_hermes_calls_in_one_turn_run_in_order(chatml, speak, conversation, local_world):
    calls = "".join(
        f'<tool_call>\n{{"name": "calc", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>\n'
        for expression in ("12*34", "1/0")
    )
    talk = conversation(chatml, speak(calls, "<think>\nhm\n</think>\n408"), max_response_tokens=256)
    world = local_world(Calculator(), QUESTION)
    await tool_agent(**VARIANTS["hermes"])(talk, world)
    results = [message.content for message in talk.messages if message.role == "tool"]
    assert results[-2:] == ["408", "error: only whole numbers, +, -, * and parentheses are known"]
    assert talk.metrics == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.5}
    assert world.score() == pytest.approx(1.0)


async def test_a_cut_turn_runs_no_call(chatml, speak, conversation, local_world):
    world = local_world(Calculator(), QUESTION)
    talk = conversation(chatml, speak("calc(12*34)\ncalc(1..."))
    await tool_agent("plain")(talk, world)
    assert (world.score(), talk.status) == (0.0, "truncated")
    assert talk.metrics == {"tools/call_frequency": 0.0}


async def test_what_cannot_be_read_is_told_to_the_model(chatml, speak, conversation, local_world):
    world = local_world(Calculator(), QUESTION)
    talk = conversation(chatml, speak("calc(12*34", "calc(12*34)", "408"))
    await tool_agent("plain", result_role="user")(talk, world)
    assert "could not be read: a call is calc(...)" in talk.messages[2].content
    assert talk.messages[2].role == "user"
    assert talk.metrics == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.5}
    assert world.score() == pytest.approx(1.0)


async def test_calls_without_end_are_bounded_by_the_turns(chatml, speak, conversation, local_world):
    talk = conversation(chatml, speak(*["calc(1)"] * 3), max_turns=3)
    with pytest.raises(ConversationOver):
        await tool_agent("plain")(talk, local_world(Calculator(), QUESTION))
    assert talk.metrics["tools/call_frequency"] == 3.0
    assert talk.status == "max_turns"


async def test_tools_are_shown_by_templates_that_know_them(
    model_folder, chatml_tokenizer, script, sampled, conversation, local_world
):
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    chat = load_chat(model_folder(chatml_tokenizer, template))
    sample = script(sampled([5, chat.stop_ids[0]]))
    talk = conversation(chat, sample)
    await tool_agent()(talk, local_world(Calculator(), QUESTION))
    assert '"name": "calc"' in chat.decode(talk.rows()[0].tokens)


async def test_a_preamble_goes_first(chatml, speak, conversation, local_world):
    class Echo:
        def reset(self, task):
            return "Go."

        def step(self, action):
            return StepResult(action, 1.0, done=True)

    talk = conversation(chatml, speak("Yes."))
    world = local_world(Echo(), QUESTION)
    await prompted_agent([{"role": "system", "content": "Be brief."}])(talk, world)
    assert [message.content for message in talk.messages] == ["Be brief.", "Go.", "Yes.", "Yes."]
    assert world.score() == 1.0


def test_agents_by_name():
    assert load_agent("trouper.envs.agents:model_agent", {}) is model_agent
    assert callable(load_agent("trouper.envs.agents:tool_agent", {"syntax": "plain"}))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("trouper.envs.agents:model_agent", {"syntax": "plain"}, "takes no arguments"),
        ("trouper.envs.agents:tool_agent", {"syntx": "plain"}, "cannot be made with"),
        ("trouper.envs.agents:tool_agent", {"syntax": "xml"}, "neither hermes nor plain"),
        ("trouper.envs.agents:tool_agent", {"result_role": "judge"}, "neither tool nor user"),
        ("trouper.envs.agents:prompted_agent", {"preamble": [{"role": "user"}]}, r"preamble\[0\]"),
        ("trouper.envs.guess:ALPHABET", {}, "cannot be called"),
        ("builtins:dict", {}, "returned a dict, not an agent"),
    ],
)
def test_agents_that_cannot_be(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_agent(name, arguments)
