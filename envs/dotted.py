"""Objects by name, `package.module:attribute`, as configurations write them. Knows nothing of what they are."""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from trouper.channels import ConfigError


def load_object(name: str) -> Any:
    """The object that `module:attribute` names; the current directory is looked in, as `python -m` does.

    Args:
        name: dots in the attribute reach into it, as in `module:Class.method`.

    Raises:
        ConfigError: not of this form, no such module, no such attribute (with the nearest name), or an import inside
            the module fails.
    """
    module_name, colon, path = name.partition(":")
    if not (colon and module_name and path):
        raise ConfigError(f"{name!r} is not of the form package.module:attribute")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise ConfigError(f"{name!r}: there is no module {missing!r}; looked in {here} and the installed") from None
        raise ConfigError(f"{name!r}: importing {module_name!r} needs {missing!r}, which is not installed") from error
    except Exception as error:  # Importing runs the user's file: whatever it raises makes the name unusable.
        raise ConfigError(f"{name!r}: importing {module_name!r} raised {type(error).__name__}: {error}") from error
    for attribute in path.split("."):
        if not hasattr(value, attribute):
            near = difflib.get_close_matches(attribute, dir(value), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{name!r}: {module_name!r} has no {attribute!r}{hint}")
        value = getattr(value, attribute)
    return value


def load_factory(name: str | Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """A factory by name, or itself, once it is known to take `arguments`; it is not called.

    Raises:
        ConfigError: it cannot be found or called, or does not take these arguments.
    """
    factory = load_object(name) if isinstance(name, str) else name
    if not callable(factory):
        raise ConfigError(f"{name!r} is a {type(factory).__name__}, which cannot be called with arguments")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return factory
    try:
        signature.bind(**arguments)
    except TypeError as error:
        given = ", ".join(sorted(arguments)) or "no arguments"
        raise ConfigError(f"{name!r} cannot be made with {given}: {error}; it takes {signature}") from None
    return factory


def made(name: str, arguments: dict[str, Any]) -> Any:
    """What the factory called `name` returns for `arguments`; what it raises is its own affair.

    Raises:
        ConfigError: it cannot be found or called, or does not take these arguments.
    """
    return load_factory(name, arguments)(**arguments)
