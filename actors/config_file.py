"""Configuration files: TOML and overrides in, a `RunConfig` out, and back. Everything wrong is said in one message.

Knows keys and types. Whether the numbers fit together is `trouper.actors.plan`'s business.
"""

import datetime
import difflib
import json
import math
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import tomli_w
from msgspec import Struct

from trouper.actors.config import RunConfig
from trouper.channels import ConfigError
from trouper.learner.model_config import ModelConfig

_TABLES: dict[str, type[Struct]] = {"model.scratch": ModelConfig}
"""Free-form tables whose keys are fields of a struct that is completed later."""

_DERIVED = {"model.scratch.vocab_size": "it follows from the chat format; leave it out"}

_ELSEWHERE = {
    "batch_size": "train.groups_per_step",
    "clip_eps": "loss.epsilon",
    "gradient_accumulation_steps": "train.micro_batch_size",
    "group_size": "rollout.num_generations",
    "kl_coef": "loss.beta",
    "lr": "optimizer.learning_rate",
    "max_completion_length": "sampling.max_response_tokens",
    "max_model_len": "sampling.max_context_tokens",
    "max_new_tokens": "sampling.max_response_tokens",
    "max_prompt_length": "sampling.max_prompt_tokens",
    "max_tokens": "sampling.max_response_tokens",
    "model_name_or_path": "model.source",
    "num_train_epochs": "tasks.epochs",
    "output_dir": "run.directory",
    "rollouts_per_example": "rollout.num_generations",
    "save_steps": "checkpoint.save_interval_steps",
}
"""What other libraries call some of our keys."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply overrides.

    Args:
        path: the file.
        overrides: `section.key=value` each. The value is TOML; where it is not, or the key holds text, it is taken
            as it stands, so quotes are not needed.

    Raises:
        ConfigError: the file is missing or is not TOML, or keys or values are wrong; all of them are named.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no configuration file {path}; the examples folder has some to start from"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {_near(text, error)}") from None
    problems: list[str] = []
    for override in overrides:
        try:
            table = _merge(table, _parse_override(override))
        except ConfigError as error:
            problems.append(str(error))
    return _read(table, str(path), problems)


def parse_config(table: Mapping[str, Any]) -> RunConfig:
    """A configuration from the tables of a file that was read already.

    Raises:
        ConfigError: keys or values are wrong; all of them are named.
    """
    return _read(table, "the configuration", [])


def dump_config(config: RunConfig) -> str:
    """TOML that loads back equal. Keys whose value is None are left out, since TOML has no null.

    Raises:
        ConfigError: a key is None that is something else when left out.
    """
    return tomli_w.dumps(_plain(config, ""))


def flatten(config: RunConfig) -> dict[str, Any]:
    """Every value by its dotted path, keys that are None included."""
    flat: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, Struct):
            for name in value.__struct_fields__:
                walk(getattr(value, name), f"{path}.{name}" if path else name)
        else:
            flat[path] = value

    walk(config, "")
    return flat


def key_paths(kind: type[Struct] = RunConfig, path: str = "") -> Iterator[str]:
    """The dotted path of every key a configuration may have, tables included."""
    for field in msgspec.structs.fields(kind):
        here = f"{path}.{field.name}" if path else field.name
        yield here
        table = _struct_of(field.type) or _TABLES.get(here)
        if table is not None:
            yield from key_paths(table, here)


# Reading


def _read(table: Mapping[str, Any], source: str, problems: list[str]) -> RunConfig:
    config = _read_table(RunConfig, table, "", problems)
    if problems:
        count = "1 thing is" if len(problems) == 1 else f"{len(problems)} things are"
        raise ConfigError(f"{source} cannot be used, {count} wrong:\n" + "\n".join(f"  {line}" for line in problems))
    return RunConfig(**config)


def _read_table(kind: type[Struct], table: Mapping[str, Any], path: str, problems: list[str]) -> dict[str, Any]:
    """The arguments for `kind`; what is wrong goes to `problems`."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    arguments: dict[str, Any] = {}
    for name, value in table.items():
        here = f"{path}.{name}" if path else str(name)
        if here in _DERIVED:
            problems.append(f"{here} = {_show(value)}: {_DERIVED[here]}")
        elif name not in fields:
            problems.append(f"{here} = {_show(value)}: there is no such key; {_suggest(here)}")
        else:
            arguments[name] = _read_value(fields[name].type, value, here, problems)
    for name, field in fields.items():
        here = f"{path}.{name}" if path else name
        if field.required and name not in table and here not in _DERIVED:
            problems.append(f"{here} is missing; it must be {_describe(field.type)}")
    return arguments


def _read_value(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    if value is None:
        if type(None) not in get_args(kind):
            problems.append(f"{path} = null: it must be {_describe(kind)}")
        return None
    struct = _struct_of(kind) or _TABLES.get(path)
    if struct is None:
        return _read_leaf(kind, value, path, problems)
    if not isinstance(value, Mapping):
        problems.append(f"{path} = {_show(value)}: it must be a table, [{path}]")
        return None
    before = len(problems)
    arguments = _read_table(struct, value, path, problems)
    if path in _TABLES:
        return dict(value)
    if len(problems) > before:
        return None
    try:
        return struct(**arguments)
    except ValueError as error:  # A struct that checks itself names the key and the limit.
        problems.append(f"[{path}] {error}")
        return None


def _read_leaf(kind: Any, value: Any, path: str, problems: list[str]) -> Any:
    try:
        converted = msgspec.convert(value, type=kind, strict=True)
    except msgspec.ValidationError:
        problems.append(f"{path} = {_show(value)}: it must be {_describe(kind)}{_nearest_choice(kind, value)}")
        return None
    # NaN compares unequal to itself and TOML has no null, so neither could be written down and loaded back equal.
    for inner, item in _leaves(converted, path):
        if item is None:
            problems.append(f"{inner} = null: TOML has no null; leave the key out")
        elif isinstance(item, float) and math.isnan(item):
            problems.append(f"{inner} = nan: it must be a number")
    return converted


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _struct_of(kind: Any) -> type[Struct] | None:
    """The struct that a field of this type holds, also where it may be None."""
    candidates = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, Struct)), None)


# Overrides


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    try:
        nested = tomllib.loads(f"{key} = 0") if equals and "\n" not in key else {}
    except tomllib.TOMLDecodeError:
        nested = {}
    if not nested:
        raise ConfigError(f"override {_show(override)}: it must be section.key=value, such as train.max_steps=100")
    names = []
    level: Any = nested
    while isinstance(level, dict):
        name, level = next(iter(level.items()))
        names.append(name)
    value = _override_value(".".join(names), text.strip())
    for name in reversed(names):
        value = {name: value}
    return dict(value)


def _override_value(path: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"] if list(parsed) == ["value"] else text
    # `run.name=7` means the text "7".
    return text if _holds_text(path) and not isinstance(value, str) else value


def _holds_text(path: str) -> bool:
    kind: Any = RunConfig
    for name in path.split("."):
        struct = _struct_of(kind)
        types_by_name = {field.name: field.type for field in msgspec.structs.fields(struct)} if struct else {}
        kind = types_by_name.get(name)
    return kind is str or kind == str | None


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both_tables = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(inner, value) if both_tables else value  # type: ignore[arg-type]  # both are mappings
    return merged


# Messages


def _near(text: str, error: tomllib.TOMLDecodeError) -> str:
    """The error with the line it speaks of."""
    message = str(error)
    _, marker, rest = message.partition("(at line ")
    number = rest.split(",")[0]
    lines = text.splitlines()
    if not marker or not number.isdigit() or int(number) > len(lines):
        return message
    return f"{message}: {lines[int(number) - 1].strip()[:80]}"


def _suggest(path: str) -> str:
    """Where a key that does not exist was probably meant to be."""
    section, _, name = path.rpartition(".")
    known = list(key_paths())
    name = name.replace("-", "_").lower()
    siblings = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == section]
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.75):
        return f"did you mean {section + '.' if section else ''}{close[0]}?"
    # Of several keys with this name the shallowest, first one is meant: the later ones are refinements.
    by_name: dict[str, str] = {}
    for each in sorted(known, key=lambda each: each.count(".")):
        by_name.setdefault(each.rpartition(".")[2], each)
    for foreign, ours in _ELSEWHERE.items():
        by_name.setdefault(foreign, ours)
    if name in by_name:
        target = by_name[name]
        table, _, key = target.rpartition(".")
        if key == name and table:
            return f"{key} belongs to [{table}]"
        return f"did you mean {target}?"
    if close := difflib.get_close_matches(name, by_name, n=1, cutoff=0.7):
        return f"did you mean {by_name[close[0]]}?"
    if section in {"", *(each.rpartition(".")[0] for each in known)} and siblings:
        where = f"[{section}]" if section else "a configuration"
        return f"{where} has {', '.join(siblings)}"
    return "the sections are " + ", ".join(each for each in known if "." not in each)


def _nearest_choice(kind: Any, value: Any) -> str:
    choices = [each for each in _choices(kind) if isinstance(each, str)]
    close = difflib.get_close_matches(value, choices, n=1, cutoff=0.6) if isinstance(value, str) else []
    return f"; did you mean {_show(close[0])}?" if close else ""


def _choices(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for each in get_args(kind) for choice in _choices(each))


_NAMES = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false"}
_NAMES_OF_MANY = {int: "whole numbers", float: "numbers", str: "texts in quotes", bool: "true or false"}


def _describe(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(each) for each in inner if each is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(_show(each) for each in inner)
    if origin in (tuple, list):
        return f"a list of {_NAMES_OF_MANY.get(inner[0], 'values')}"
    if origin is dict or _struct_of(kind) is not None:
        return "a table"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _show(value: Any) -> str:
    """A value much as TOML writes it, cut to a readable length."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# Writing


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, Struct):
        table = {}
        for field in msgspec.structs.fields(value):
            here = f"{path}.{field.name}" if path else field.name
            item = getattr(value, field.name)
            if item is not None:
                table[field.name] = _plain(item, here)
            elif field.default is not None:
                raise ConfigError(
                    f"{here} = None cannot be written: TOML has no null, and left out it is {field.default}"
                )
        return table
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, bool | int | float | str | datetime.datetime | datetime.date | datetime.time):
        return value
    raise ConfigError(f"{path} = {value!r} cannot be written: TOML has no {type(value).__name__}")
