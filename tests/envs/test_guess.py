from collections import Counter

import pytest

from trouper.channels import Task
from trouper.envs import PlainChat
from trouper.envs.guess import ALPHABET, STOP, Guess, guess_tasks


def play(secret: int, *actions: str) -> tuple[list[str], float, bool]:
    world = Guess()
    assert world.reset(Task("t", {"secret": secret})) == "?"
    results = [world.step(action) for action in actions]
    assert not any(result.done for result in results[:-1])
    return [result.observation for result in results], world.reward(), results[-1].done


def test_found_at_once():
    assert play(7, "7;") == (["="], 1.0, True)


def test_each_guess_more_costs_a_tenth():
    answers, reward, done = play(7, "5;", "9;", "7;")
    assert (answers, done) == ([">", "<", "="], True)
    assert reward == pytest.approx(0.8)


def test_five_guesses_end_it():
    answers, reward, done = play(0, *(f"{digit};" for digit in range(1, 6)))
    assert (answers, done) == (["<"] * 5, True)
    assert reward == pytest.approx(0.25)


@pytest.mark.parametrize("action", ["77", "7", ";", ";7", "", "=;", "7;;", "²;"])
def test_what_is_no_guess_ends_it(action):
    _, reward, done = play(7, "5;", action)
    assert done
    assert reward == pytest.approx(0.05)


def test_everything_it_says_can_be_written():
    chat = PlainChat(ALPHABET, STOP)
    assert chat.vocab_size == 15
    assert chat.stop_ids == (10,)


def test_secrets_are_a_pure_function_of_the_draw():
    tasks = guess_tasks(5)
    drawn = [tasks.task(draw) for draw in range(1000)]
    assert drawn[::-1] == [guess_tasks(5).task(draw) for draw in reversed(range(1000))]
    counts = Counter(task.payload["secret"] for task in drawn)
    assert set(counts) == set(range(10))
    assert min(counts.values()) > 60
    assert [guess_tasks(6).task(draw) for draw in range(20)] != drawn[:20]
