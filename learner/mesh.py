"""Devices as a mesh, and which axis of which parameter lies on which of its axes. One CPU device is the smallest mesh.

`data` and `fsdp` both split the rows of a batch; `fsdp` also splits the parameters, gradients and optimizer state;
`tensor` splits the insides of attention and MLP. Trainer and sampler share the mesh, or have devices of their own.
Knows parameters by name and shape only.
"""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from msgspec import Struct

from trouper.channels import ConfigError

BATCH = P(("data", "fsdp"))  # type: ignore[no-untyped-call]
"""Rows of a batch; every other axis is whole on every device."""

# By the last two parts of a parameter's name. Inputs of a block's matrices are D wide and lie on `fsdp`; what is inside
# the block lies on `tensor`, so that each block needs one reduction over `tensor` at its end.
_SPECS: dict[tuple[str, str], tuple[str, ...]] = {
    ("embed_tokens", "embedding"): ("tensor", "fsdp"),
    ("lm_head", "kernel"): ("fsdp", "tensor"),
    **{(name, "kernel"): ("fsdp", "tensor") for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
    **{(name, "bias"): ("tensor",) for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")},
    **{(name, "kernel"): ("tensor", "fsdp") for name in ("o_proj", "down_proj")},
}


class MeshConfig(Struct, frozen=True, kw_only=True):
    """Sizes of the mesh's axes; their product is the number of devices.

    Attributes:
        data: copies of the parameters, each with its share of the rows.
        fsdp: parts that parameters and optimizer state are split into; each takes its share of the rows too.
        tensor: parts that each matrix's inside is split into.
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "fsdp", "tensor"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} = {getattr(self, axis)}; every mesh axis is 1 or more")

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return self.data * self.fsdp * self.tensor


class PlacementConfig(Struct, frozen=True, kw_only=True):
    """Which devices do what, by their numbers in `jax.devices()`. Left out, both work on the mesh's, the first ones.

    Attributes:
        trainer: the mesh's devices, in its order.
        sampler: the same ones, or others: then trainer and sampler run side by side, each weight sync copies across,
            and several devices split the model as `tensor` does.
    """

    trainer: tuple[int, ...] | None = None
    sampler: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.trainer is None and self.sampler is None:
            return
        if self.trainer is None or self.sampler is None:
            given, missing = ("trainer", "sampler") if self.sampler is None else ("sampler", "trainer")
            raise ValueError(
                f"{given} = {list(getattr(self, given))} and no {missing}; name the devices of both, or none"
            )
        for name, numbers in (("trainer", self.trainer), ("sampler", self.sampler)):
            if not numbers or min(numbers) < 0 or len(set(numbers)) < len(numbers):
                raise ValueError(f"{name} = {list(numbers)}; it takes one or more device numbers, from 0 on, each once")
        common = set(self.trainer) & set(self.sampler)
        if common and set(self.trainer) != set(self.sampler):
            raise ValueError(
                f"trainer = {list(self.trainer)} and sampler = {list(self.sampler)} have {sorted(common)} in common; "
                "give both the same devices, which they share, or each devices of its own"
            )

    @property
    def apart(self) -> bool:
        """Whether trainer and sampler have devices of their own."""
        return self.trainer is not None and self.sampler is not None and set(self.trainer) != set(self.sampler)


def misfits(mesh: MeshConfig, placement: PlacementConfig, devices: int | None) -> Iterator[str]:
    """What is wrong with the two together, and with the machine.

    Args:
        mesh: the trainer's.
        placement: which devices it is made of.
        devices: how many there are, where they were counted.
    """
    takes = f"mesh: data x fsdp x tensor = {mesh.data} x {mesh.fsdp} x {mesh.tensor} = {mesh.devices} devices"
    if devices is not None and mesh.devices > devices:
        yield f"{takes}, and there are {devices}"
    if placement.trainer is not None and len(placement.trainer) != mesh.devices:
        numbers = list(placement.trainer)
        yield f"{takes}, and placement.trainer = {numbers} names {len(numbers)}: make them agree"
    for name, given in (("trainer", placement.trainer), ("sampler", placement.sampler)):
        if devices is not None and given is not None and max(given) >= devices:
            yield (
                f"placement.{name} = {list(given)}: there is no device {max(given)}, JAX sees {devices}, from 0 on; "
                "name those (a CPU makes several of itself with XLA_FLAGS=--xla_force_host_platform_device_count=N)"
            )


def numbered_devices(numbers: Sequence[int] | None) -> list[jax.Device]:
    """The devices of these numbers; all that JAX sees where None."""
    devices = jax.devices()
    return devices if numbers is None else [devices[number] for number in numbers]


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh over the first devices of those given.

    Args:
        config: the axes' sizes.
        devices: None means all that JAX sees.

    Raises:
        ConfigError: there are fewer devices than the mesh takes.
    """
    available = list(jax.devices() if devices is None else devices)
    if config.devices > len(available):
        raise ConfigError(
            f"mesh data={config.data} x fsdp={config.fsdp} x tensor={config.tensor} takes {config.devices} devices and "
            f"there are {len(available)}; make an axis smaller, or give the trainer more devices"
        )
    grid = np.array(available[: config.devices]).reshape(config.data, config.fsdp, config.tensor)
    return Mesh(grid, ("data", "fsdp", "tensor"))


def param_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where a parameter lies; an axis that a mesh axis does not divide stays whole, and so do unknown names.

    Args:
        mesh: from `make_mesh`.
        name: the parameter's path, parts joined by `/`.
        shape: its shape.
    """
    spec = _SPECS.get(tuple(name.split("/")[-2:]), ())  # type: ignore[arg-type]  # a two-part path or a miss
    parts = [axis if size % mesh.shape[axis] == 0 else None for size, axis in zip(shape, spec, strict=False)]
    return NamedSharding(mesh, P(*parts))  # type: ignore[no-untyped-call]
