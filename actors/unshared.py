"""A factory of environments that must make a new one every time. Knows nothing of who calls it, or where."""

import contextlib
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from trouper.actors.threads import is_async
from trouper.channels import RunError


def unshared(make: Callable[[], Any]) -> Callable[[], Any]:
    """`make`, but an environment that it hands out a second time ends the run.

    Two episodes in one object would see each other's state, and so would the next life of one that failed. A class
    that can bear it says so with `thread_safe = True`.
    """
    made: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
    registering = threading.Lock()  # plain factories run in several threads

    def checked(environment: Any) -> Any:
        if getattr(environment, "thread_safe", False):
            return environment
        with registering:
            if made.get(id(environment)) is environment:
                raise RunError(
                    f"the environment factory returned the same {type(environment).__qualname__} object twice; its "
                    "episodes would share their state. Return a new one from every call, or mark the class with "
                    "thread_safe = True"
                )
            with contextlib.suppress(TypeError):  # a class with __slots__ and no weak references goes unchecked
                made[id(environment)] = environment
        return environment

    async def later(environment: Awaitable[Any]) -> Any:
        return checked(await environment)

    async def make_async() -> Any:
        return await later(make())

    def make_plain() -> Any:
        value = make()
        return later(value) if inspect.isawaitable(value) else checked(value)

    return make_async if is_async(make) else make_plain
