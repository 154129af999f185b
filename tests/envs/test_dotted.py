import sys

import pytest

from trouper.channels import ConfigError
from trouper.envs import load_factory, load_object, made
from trouper.envs.guess import Guess


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "hungry.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "angry.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])


def test_objects_by_name():
    assert load_object("trouper.envs.guess:Guess") is Guess
    assert load_object("trouper.envs.guess:Guess.step") is Guess.step
    assert isinstance(made("trouper.envs.guess:Guess", {}), Guess)


def test_a_factory_is_known_to_take_its_arguments_without_being_called():
    class Fragile:
        def __init__(self, size=1):
            raise TypeError("inside")

    assert load_factory(Fragile, {"size": 2}) is Fragile
    with pytest.raises(ConfigError, match=r"cannot be made with colour, size: .*'colour'; it takes \(size=1\)"):
        load_factory(Fragile, {"size": 2, "colour": 3})
    with pytest.raises(ConfigError, match="is a int, which cannot be called"):
        load_factory(3, {})
    assert made("collections:deque", {"maxlen": 3}).maxlen == 3


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trouper.envs.guess", "not of the form"),
        (":x", "not of the form"),
        ("x:", "not of the form"),
        ("trouper.envs.gess:Guess", "there is no module 'trouper.envs.gess'"),
        ("nowhere.at_all:x", "there is no module 'nowhere'"),
        ("trouper.envs.guess:Gues", "'trouper.envs.guess' has no 'Gues'; did you mean 'Guess'"),
        ("trouper.envs.guess:zzzz", "has no 'zzzz'$"),
        ("hungry:x", "needs 'not_installed_anywhere', which is not installed"),
        ("angry:x", "raised RuntimeError: no"),
    ],
)
def test_names_that_lead_nowhere(name, message):
    with pytest.raises(ConfigError, match=message):
        load_object(name)
