"""`[placement]` before anything starts: what is refused, and whose memory is counted where."""

import pytest
from msgspec.structs import replace

from trouper.actors.cli import main
from trouper.actors.config_file import dump_config, load_config, parse_config
from trouper.actors.plan import plan
from trouper.channels import ConfigError
from trouper.learner.mesh import MeshConfig, PlacementConfig
from trouper.learner.model_config import ModelConfig

SHAPE = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    intermediate_size=16,
)


def configured(placement=None, **sections):
    given = {} if placement is None else {"placement": placement}
    return parse_config({"tasks": {"source": "a:b"}, "model": {"source": "some/model"}, **given, **sections})


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ({"trainer": [0]}, r"\[placement\] trainer = \[0\] and no sampler; name the devices of both, or none"),
        ({"sampler": [0]}, r"\[placement\] sampler = \[0\] and no trainer"),
        ({"trainer": [], "sampler": [1]}, r"trainer = \[\]; it takes one or more device numbers"),
        ({"trainer": [0], "sampler": [-1]}, r"sampler = \[-1\]; it takes one or more device numbers, from 0 on"),
        ({"trainer": [0, 0], "sampler": [1]}, r"trainer = \[0, 0\]; .* each once"),
        ({"trainer": [0, 1], "sampler": [1, 2]}, r"have \[1\] in common; give both the same devices"),
        ({"trainer": 0, "sampler": [1]}, "placement.trainer = 0: it must be a list of whole numbers"),
        ({"learner": [0]}, "placement.learner = .* there is no such key"),
    ],
)
def test_lists_that_make_no_sense_are_refused(placement, said):
    with pytest.raises(ConfigError, match=said):
        configured(placement)


@pytest.mark.parametrize(
    ("placement", "mesh", "said"),
    [
        ({"trainer": [0], "sampler": [4]}, {}, r"placement.sampler = \[4\]: there is no device 4, JAX sees 4"),
        ({"trainer": [0, 1], "sampler": [2]}, {}, r"= 1 devices, and placement.trainer = \[0, 1\] names 2"),
        ({"trainer": [0], "sampler": [2]}, {"data": 2}, r"= 2 devices, and placement.trainer = \[0\] names 1"),
        (
            {"trainer": [0], "sampler": [1, 2, 3]},
            {},
            "placement.sampler's devices, 3, does not divide the model's num_a",
        ),
    ],
)
def test_what_does_not_fit_machine_mesh_or_model_is_refused(placement, mesh, said):
    with pytest.raises(ConfigError, match=said):
        plan(configured(placement, mesh=mesh), SHAPE, devices=4)


def test_a_dry_run_counts_the_devices(tmp_path, capsys):
    path = tmp_path / "far.toml"
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "a"}\n')
    path.write_text(dump_config(configured({"trainer": [0], "sampler": [999]}, tasks={"source": str(tasks)})))
    assert main(["train", str(path), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "there is no device 999, JAX sees " in said.err
    assert "episodes per step" in said.out  # for whoever plans a run on another machine


def test_a_placement_is_written_down_and_loaded_back_equal(tmp_path):
    config = configured({"trainer": [2, 3], "sampler": [0]})
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config
    assert config.placement == PlacementConfig(trainer=(2, 3), sampler=(0,))


def test_the_same_devices_in_both_are_shared():
    assert not configured({"trainer": [0, 1], "sampler": [1, 0]}).placement.apart
    assert not configured().placement.apart
    assert configured({"trainer": [0], "sampler": [1]}).placement.apart


def test_memory_is_counted_where_it_lies():
    together = plan(configured(mesh={"data": 2}), SHAPE)
    apart = plan(configured({"trainer": [0, 1], "sampler": [3]}, mesh={"data": 2}), SHAPE)
    assert {part.where for part in together.memory} == {"host", "device"}
    on_sampler = {part.name: part.bytes for part in apart.memory if part.where == "sampler"}
    assert on_sampler.keys() == {"weights for sampling", "keys and values"}
    # One device in place of two, neither of which holds a part.
    shared = {part.name: part.bytes for part in together.memory if part.name in on_sampler}
    assert shared == {name: 2 * size for name, size in on_sampler.items()}
    # The trainer keeps the rest, and for a moment a copy that travels.
    copies = [part.bytes for part in apart.memory if part.name == "copy on its way to the sampler"]
    assert apart.total_bytes("trainer") == together.total_bytes("device") - sum(shared.values()) + sum(copies)
    assert apart.total_bytes("device") == 0


def test_a_dry_run_says_which_devices_hold_how_much():
    text = plan(configured({"trainer": [0, 1], "sampler": [3]}, mesh={"data": 2}), SHAPE).render()
    assert "memory for trainer  at most " in text
    assert " on devices 0, 1, " in text
    assert " on device 3 besides activations" in text
    assert "memory on devices" not in text
    assert " on device" not in plan(configured(), SHAPE).render().split("memory on devices")[1]


def test_the_sampler_of_a_shared_placement_is_spread_as_the_mesh():
    shared = plan(configured({"trainer": [2, 3], "sampler": [2, 3]}, mesh={"tensor": 2}), SHAPE, devices=4)
    plain = plan(replace(configured(), mesh=MeshConfig(tensor=2)), SHAPE, devices=4)
    assert shared.memory == plain.memory
    assert shared.places == {"device": (2, 3)}
