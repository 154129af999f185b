import json

import pytest

from trouper.channels import ConfigError, Task
from trouper.envs import JsonlTasks, TaskList, load_tasks


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        return path

    return write


def test_records_become_tasks_with_their_values_as_they_are(write):
    path = write(
        {"id": "a", "prompt": "p", "truth": 7}, "", {"prompt": "q", "truth": "7", "environment": "maze"}, {"id": 9}
    )
    tasks = JsonlTasks(path, shuffle=False, environment="home")
    assert len(tasks) == 3
    first, second, third = (tasks.task(draw) for draw in range(3))
    assert (first.id, first.payload, first.environment) == ("a", {"prompt": "p", "truth": 7}, "home")
    assert (second.id, second.payload, second.environment) == ("3", {"prompt": "q", "truth": "7"}, "maze")
    assert third.id == "9"


def test_every_epoch_has_every_record_in_another_order(write):
    path = write(*({"id": index} for index in range(20)))
    tasks = JsonlTasks(path, seed=1, epochs=2)
    order = [tasks.task(draw).id for draw in range(40)]
    assert set(order[:20]) == set(order[20:]) == {str(index) for index in range(20)}
    assert order[:20] != order[20:]
    assert tasks.task(40) is None
    assert JsonlTasks(path, seed=2).task(0) is not None


def test_a_draw_is_the_same_task_in_any_order_of_asking(write):
    path = write(*({"id": index} for index in range(7)))
    forwards, backwards = JsonlTasks(path, seed=3), JsonlTasks(path, seed=3)
    asked = {draw: backwards.task(draw) for draw in reversed(range(30))}
    assert all(forwards.task(draw) == asked[draw] for draw in range(30))


def test_without_epochs_it_never_ends(write):
    assert JsonlTasks(write({"a": 1})).task(10**9) is not None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{bad"], r"tasks\.jsonl, line 1: not JSON"),
        (['{"a": 1}', "[1]"], "line 2: a list, not a JSON object"),
        (['{"q": 1}'], "line 1: no field 'prompt'; there is 'q'"),
        (['{"prompt": 1, "id": true}'], "line 1: field 'id' is True"),
        (['{"prompt": 1, "id": null}'], "line 1: field 'id' is None"),
        (['{"prompt": 1, "environment": 3}'], "line 1: field 'environment' is 3"),
        (['{"prompt": 1, "id": 1}', "", '{"prompt": 1, "id": "1"}'], "line 3: id '1' was already used in line 1"),
        ([""], "holds no tasks"),
    ],
)
def test_records_that_cannot_be_used_are_named(write, lines, message):
    required = ("prompt",) if "prompt" in lines[0] or "q" in lines[0] else ()
    with pytest.raises(ConfigError, match=message):
        JsonlTasks(write(*lines), required=required)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        JsonlTasks(tmp_path / "no.jsonl")


def test_streams_by_name(write):
    path = write({"a": 1})
    assert load_tasks(str(path), {"epochs": 1}).task(1) is None
    guess = load_tasks("trouper.envs.guess:guess_tasks", {"seed": 4})
    assert guess.task(3) == load_tasks("trouper.envs.guess:guess_tasks", {"seed": 4}).task(3)
    with pytest.raises(ConfigError, match="without a method task"):
        load_tasks("builtins:dict", {})
    with pytest.raises(ConfigError, match=r"cannot be made with path, sed"):
        load_tasks(str(path), {"sed": 1})


def test_a_list_of_tasks():
    tasks = [Task(str(index)) for index in range(5)]
    assert [TaskList(tasks, shuffle=False).task(draw) for draw in (0, 4, 5)] == [tasks[0], tasks[4], tasks[0]]
    assert {TaskList(tasks, seed=1).task(draw).id for draw in range(5)} == set("01234")
    assert TaskList(tasks, epochs=1).task(5) is None
    with pytest.raises(ConfigError, match="a list of tasks is empty"):
        TaskList([])
