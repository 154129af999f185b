import numpy as np
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from trouper.channels import Message, SamplerError, Sampling
from trouper.envs import ConversationOver, PlainChat, ToolCall, hermes, load_chat

E, NL = 145, 198


def facts(row):
    return row.tokens.tolist(), row.loss_mask.astype(int).tolist()


@pytest.fixture
def ab_chat(model_folder):
    """Pieces ab=1 c=2 a=3 bc=4: 'abc' has two spellings, and the encoder prefers [1, 2]."""
    vocabulary = {"E": 0, "ab": 1, "c": 2, "a": 3, "bc": 4, "b": 5, "o": 8, "p": 9}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("b", "c")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("E", special=True)])
    assert tokenizer.encode("abc").ids == [1, 2]
    return load_chat(model_folder(tokenizer, generation_config={"eos_token_id": 0}), format="plain")


async def test_sampled_ids_are_never_encoded_again(ab_chat, script, sampled, conversation):
    sample = script(sampled([3, 4], "length", [-0.1, -0.2], 5), sampled([2, 3], "length", [-0.3, -0.4], 6))
    talk = conversation(ab_chat, sample)
    talk.user("pp")
    assert (await talk.generate()).text == "abc"
    talk.user("oo")
    await talk.generate()
    assert sample.asked[1] == [9, 9, 3, 4, 8, 8]
    (row,) = talk.rows()
    assert facts(row) == ([9, 9, 3, 4, 8, 8, 2, 3], [0, 0, 1, 1, 0, 0, 1, 1])
    assert row.logprobs.tolist() == np.array([0, 0, -0.1, -0.2, 0, 0, -0.3, -0.4], np.float32).tolist()
    assert row.versions.tolist() == [-1, -1, 5, 5, -1, -1, 6, 6]
    assert row.sampling == Sampling()


@pytest.fixture
def toy(model_folder, letters):
    """One id per letter; a turn ends with E and a newline, a later prompt opens with two ids."""
    ids = {letter: 10 + index for index, letter in enumerate("abc")} | {"\n": NL}
    ids |= {"k": 20, "l": 21, "x": 30, "y": 31, "[": 40, "]": 41, "m": 50, "n": 51}
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.role != 'user' %}{{ 'E\n' }}{% endif %}{% endfor %}"
        "{% if messages | length > 1 and add_generation_prompt %}[]{% endif %}"
    )
    return load_chat(model_folder(letters(ids, {"E": E}), template, generation_config={"eos_token_id": E}))


ROW = [10, 11, 12, 20, 21, E, NL, 30, 31, E, NL, 40, 41, 50, 51, E]


async def test_the_template_completes_what_the_sampler_stopped_at(toy, script, sampled, conversation):
    """The newline after the end token is in the row, and is not trained."""
    talk = conversation(toy, script(sampled([20, 21, E]), sampled([50, 51, E])))
    talk.user("abc")
    assert (await talk.generate()).text == "kl"
    talk.tool("xy")
    await talk.generate()
    (row,) = talk.rows()
    assert facts(row) == (ROW, [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    assert row.sampled == 6


async def test_an_end_token_that_was_not_sampled_is_added_untrained(toy, script, sampled, conversation):
    talk = conversation(toy, script(sampled([20, 21], "length"), sampled([50, 51, E])))
    talk.user("abc")
    assert (await talk.generate()).truncated
    assert talk.status == "truncated"
    talk.tool("xy")
    await talk.generate()
    assert talk.status == "done"
    (row,) = talk.rows()
    assert facts(row) == (ROW, [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    assert row.logprobs[~row.loss_mask].tolist() == [0] * 11


@pytest.fixture
def forgetful(model_folder, letters):
    """Writes the thinking of a turn only until the next user message."""
    ids = {str(digit): digit for digit in range(10)} | {"t": 91, "\n": NL}
    template = (
        "{%- set ns = namespace(last=-1) %}"
        "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '4' }}"
        "{{- m.content.split('</think>')[-1] if loop.index0 < ns.last else m.content }}{{- 'E\n' }}"
        "{%- else %}{{- m.content }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}4{%- endif %}"
    )
    tokenizer = letters(ids, {"E": E}, {"<think>": 90, "</think>": 92})
    return load_chat(model_folder(tokenizer, template, generation_config={"eos_token_id": E}))


async def two_turns(talk, role):
    talk.user("123")
    turn = await talk.generate()
    assert (turn.reasoning, turn.text) == ("t", "5")
    getattr(talk, role)("6789")
    await talk.generate()
    return talk.rows()


TURN_1 = [1, 2, 3, 4, 90, 91, 92, 5, E]


async def test_a_rewriting_template_forks_a_row_as_rendered(forgetful, script, sampled, conversation):
    assert not forgetful.prefix_preserving
    talk = conversation(forgetful, script(sampled(TURN_1[4:]), sampled([8, E])))
    first, second = await two_turns(talk, "user")
    assert facts(first) == (TURN_1, [0] * 4 + [1] * 5)
    assert facts(second) == ([1, 2, 3, 4, 5, E, NL, 6, 7, 8, 9, 4, 8, E], [0] * 12 + [1, 1])
    assert talk.forks == 1


async def test_a_rewriting_template_may_be_appended_to(forgetful, script, sampled, conversation):
    talk = conversation(forgetful, script(sampled(TURN_1[4:]), sampled([8, E])), on_rewrite="append")
    (row,) = await two_turns(talk, "user")
    assert row.tokens.tolist() == [*TURN_1, NL, 6, 7, 8, 9, 4, 8, E]
    assert talk.forks == 0


async def test_a_tool_result_rewrites_nothing(forgetful, script, sampled, conversation):
    talk = conversation(forgetful, script(sampled(TURN_1[4:]), sampled([8, E])))
    (row,) = await two_turns(talk, "tool")
    assert row.tokens.tolist() == [*TURN_1, NL, 6, 7, 8, 9, 4, 8, E]
    assert talk.forks == 0


PLAIN = PlainChat("ox;", ";")


async def test_an_observation_larger_than_the_context_ends_the_talk(script, sampled, conversation):
    sample = script(sampled([1] * 8, "length"))
    talk = conversation(PLAIN, sample, max_context=100, max_response_tokens=8)
    talk.user("o" * 52)
    await talk.generate()
    talk.user("o" * 50)
    with pytest.raises(ConversationOver, match=r"110 tokens leave no room in a context of 100"):
        await talk.generate()
    assert talk.status == "context_overflow"
    assert len(sample.asked) == 1
    (row,) = talk.rows()
    assert (len(row.tokens), row.sampled) == (60, 8)


async def test_a_last_observation_that_is_not_answered_overflows_nothing(script, sampled, conversation):
    talk = conversation(PLAIN, script(sampled([1] * 7 + [2])), max_context=100, max_response_tokens=8)
    talk.user("o" * 52)
    await talk.generate()
    talk.user("o" * 50)
    assert talk.status == "done"
    assert len(talk.rows()[0].tokens) == 60


@pytest.mark.parametrize(("used", "limit"), [(95, 5), (99, 1), (40, 8)])
async def test_a_turn_gets_what_the_context_has_left(script, sampled, conversation, used, limit):
    sample = script(sampled([1] * limit, "length"))
    talk = conversation(PLAIN, sample, max_context=100, max_response_tokens=8)
    talk.user("o" * used)
    assert (await talk.generate()).finish == "length"
    assert sample.limits == [limit]
    assert talk.status == "truncated"


async def test_a_full_context_asks_nothing(script, conversation):
    talk = conversation(PLAIN, script(), max_context=100)
    talk.user("o" * 100)
    with pytest.raises(ConversationOver):
        await talk.generate()
    assert talk.status == "context_overflow"
    assert talk.rows() == ()


async def test_the_cap_of_a_turn_does_not_cut_the_row(script, sampled, conversation):
    talk = conversation(PLAIN, script(sampled([1] * 8), sampled([1] * 8)), max_context=100, max_response_tokens=8)
    talk.user("oo")
    await talk.generate()
    talk.user("oooo")
    await talk.generate()
    (row,) = talk.rows()
    assert (len(row.tokens), row.sampled) == (22, 16)


async def test_a_prompt_that_is_too_long_asks_nothing(script, conversation):
    talk = conversation(PLAIN, script(), max_prompt_tokens=3)
    talk.user("oooo")
    with pytest.raises(ConversationOver, match="a prompt of 4 tokens, at most 3"):
        await talk.generate()


async def test_a_row_begun_later_may_be_longer_than_a_prompt(script, sampled, conversation):
    talk = conversation(PLAIN, script(sampled([1, 2]), sampled([1, 2])), max_prompt_tokens=3)
    talk.user("ooo")
    await talk.generate()
    talk.fork()
    await talk.generate()
    assert [len(row.tokens) for row in talk.rows()] == [5, 7]


async def test_turns_run_out(script, sampled, conversation):
    talk = conversation(PLAIN, script(sampled([1, 2])), max_turns=1)
    await talk.generate()
    with pytest.raises(ConversationOver, match="max_turns"):
        await talk.generate()
    assert (talk.status, talk.turns, len(talk.rows())) == ("max_turns", 1, 1)


async def test_given_assistant_messages_are_not_trained(chatml, speak, conversation):
    talk = conversation(chatml, speak("calc(1)"))
    talk.system("Use calc.")
    talk.extend([Message("user", "What is 3?")])
    talk.assistant("calc(3)")
    talk.user("What is 1?")
    await talk.generate()
    (row,) = talk.rows()
    assert chatml.decode(row.tokens[row.loss_mask]) == "calc(1)<|im_end|>"
    assert [message.role for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]


async def test_an_agent_may_begin_a_new_row(chatml, speak, conversation):
    talk = conversation(chatml, speak("It is 5.", "It", "It is"))
    talk.fork()
    assert talk.forks == 0
    talk.user("Add 2 and 3")
    await talk.generate()
    talk.fork()
    await talk.generate()
    talk.rewrite([Message("user", "Be brief.")])
    await talk.generate()
    rows = talk.rows()
    assert talk.forks == 2
    assert [row.sampled for row in rows] == [len(chatml._encode(text, [])) + 1 for text in ("It is 5.", "It", "It is")]
    prompt = chatml.decode(rows[2].tokens[~rows[2].loss_mask])
    assert prompt == "<|im_start|>user\nBe brief.<|im_end|>\n<|im_start|>assistant\n"


async def test_status_remembers_a_cut_turn_over_a_fork(chatml, speak, conversation):
    talk = conversation(chatml, speak("It is..."))
    await talk.generate()
    talk.fork()
    assert talk.status == "truncated"


async def test_calls_are_read_from_sampled_text_alone(chatml, speak, conversation):
    call = '<tool_call>\n{"name": "f", "arguments": {"a":1}}\n</tool_call>'
    talk = conversation(chatml, speak(call, "It is 5."))
    talk.user(call)
    assert (await talk.generate(hermes())).calls == (ToolCall("f", {"a": 1}),)
    talk.tool(call)
    assert (await talk.generate(hermes())).calls == ()
    sampled_text = [chatml.decode(row.tokens[row.loss_mask]) for row in talk.rows()]
    assert sampled_text == [f"{call}<|im_end|>It is 5.<|im_end|>"]


async def test_a_request_that_is_cut_short_leaves_the_row_as_it_was(chatml, speak, conversation, autojump_clock):
    script = speak("It is 5.")

    async def sample(tokens, **limits):
        return await script(tokens, **limits) if script.turns else await trio.sleep_forever()

    talk = conversation(chatml, sample)
    talk.user("Add 2 and 3")
    await talk.generate()
    before = facts(talk.rows()[0])
    talk.user("Add 4")
    with trio.move_on_after(60):
        await talk.generate()
    assert facts(talk.rows()[0]) == before
    assert talk.turns == 1


async def test_two_turns_at_once_are_refused_and_the_row_stays_whole(chatml, speak, conversation, autojump_clock):
    script = speak("It is 5.", "It is 6.")

    async def sample(tokens, **limits):
        await trio.sleep(1)
        return await script(tokens, **limits)

    talk = conversation(chatml, sample)
    talk.user("Add 2 and 3")

    async def interrupt():
        await trio.sleep(0.5)
        with pytest.raises(RuntimeError, match="one turn at a time"):
            await talk.generate()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(talk.generate)
        nursery.start_soon(interrupt)
    assert (await talk.generate()).text == "It is 6."
    (row,) = talk.rows()
    assert chatml.decode(row.tokens[row.loss_mask]) == "It is 5.<|im_end|>It is 6.<|im_end|>"


@pytest.mark.parametrize(
    ("count", "logprobs", "message"),
    [
        (2, [-0.5], "2 tokens, 1 log-probs"),
        (9, None, "9 tokens where at most 8"),
        (1, [float("nan")], "not finite"),
        (1, [float("-inf")], "not finite"),
    ],
)
async def test_a_sampler_that_breaks_its_word_is_named(script, sampled, conversation, count, logprobs, message):
    talk = conversation(PLAIN, script(sampled([1] * count, "stop", logprobs)), max_response_tokens=8)
    with pytest.raises(SamplerError, match=message):
        await talk.generate()
    assert talk.rows() == ()


async def test_a_sampler_may_say_nothing(chatml, script, sampled, conversation):
    talk = conversation(chatml, script(sampled([]), sampled([5])))
    assert (await talk.generate()).text == ""
    await talk.generate()
    (row,) = talk.rows()
    assert row.sampled == 1


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("say"), st.lists(st.integers(0, 2), max_size=6)),
        st.tuples(st.sampled_from(["user", "tool"]), st.text("ox", max_size=5)),
        st.tuples(st.just("fork"), st.none()),
    ),
    max_size=12,
)


@given(STEPS)
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_hold_exactly_what_was_sampled_in_its_order(script, sampled, conversation, steps):
    turns = [sampled(ids, version=index) for index, (what, ids) in enumerate(steps) if what == "say"]
    sample = script(*turns)

    async def play():
        talk = conversation(PLAIN, sample)
        for what, value in steps:
            if what == "say":
                await talk.generate()
            elif what == "fork":
                talk.fork()
            else:
                getattr(talk, what)(value)
        return talk.rows()

    rows = trio.run(play)
    for row in rows:
        assert len(row.tokens) == len(row.loss_mask) == len(row.logprobs) == len(row.versions)
        assert ((row.versions >= 0) == row.loss_mask).all()
        assert ((row.logprobs < 0) == row.loss_mask).all()
    kept = [row.tokens[row.loss_mask].tolist() for row in rows]
    assert [token for ids in kept for token in ids] == [token for turn in turns for token in turn.tokens.tolist()]
    versions = [version for row in rows for version in row.versions[row.loss_mask].tolist()]
    assert versions == [version for turn in turns for version in turn.versions.tolist()]
