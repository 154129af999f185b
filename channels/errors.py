"""The one exception tree. Every message says what was given, what the limit is, and what to do.

`TrouperError` is what a caller catches; `exit_code` is what the command line returns for it.
An error that stops a run before anything started is a `ConfigError` (exit code 2); one that ends a run is a
`RunError` (exit code 1).
"""

from collections.abc import Iterator


class TrouperError(Exception):
    """Root of everything trouper raises on purpose.

    Attributes:
        exit_code: what the command line returns for it.
        final: doing the same again would end the same way, so no supervisor restarts whoever raised it.
    """

    exit_code = 1
    final = False


class ConfigError(TrouperError):
    """A configuration that cannot run: an unknown key, a wrong type, numbers that contradict each other."""

    exit_code = 2
    final = True


class GraphError(ConfigError):
    """An actor graph whose wiring is wrong; the message names the channel or actor."""


class ModelError(ConfigError):
    """A model folder that cannot be used: unsupported maths, a missing, extra or misshapen array, a broken file."""


class ChatError(ConfigError):
    """A tokenizer or chat template that cannot be used, or a message it cannot render."""


class RunError(TrouperError):
    """A run that started and had to end."""

    final = True


class RestartLimit(RunError):
    """A supervisor restarted its children too often within its window.

    Attributes:
        history: one `Exited` per restart inside the window, oldest first.
        first_cause: the exception that came first, also the `__cause__`.
    """

    final = False

    def __init__(self, message: str, history: tuple[object, ...], first_cause: BaseException | None) -> None:
        super().__init__(message)
        self.history = history
        self.first_cause = first_cause
        self.__cause__ = first_cause


class StartError(RunError):
    """A child ended, or ran out of time, before it called `task_status.started()`."""

    final = False


class Stalled(RunError):
    """Every task waits for another one and no deadline will end it; the message is the wait graph."""


class SyncError(RunError):
    """New weights could not be brought to a sampler; the message names the sampler and the attempt."""


class HopelessRun(RunError):
    """The breaker: too many attempts were lost, or too many steps had nothing to learn from."""


class NumericsError(RunError):
    """A loss, gradient or log-prob that is not finite."""


class CheckpointError(RunError):
    """A checkpoint that could not be written, found or read back."""


class EnvironmentFailure(TrouperError):
    """Infrastructure failed under an attempt; it is counted and tried again, and never becomes a reward.

    Attributes:
        kind: the class that is counted, one of `trouper.channels.LossKind`.
        retry: whether another try could go better; an environment that knows it cannot raises it with False.
    """

    def __init__(self, kind: str, message: str, *, retry: bool = True) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry = retry


class RewardError(TrouperError):
    """A reward function returned something that is no reward; the message names the function and the value."""


class SamplerError(TrouperError):
    """A generation request that no sampler can serve; the message says which limit it breaks."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came from, each once: user code may raise errors that are their own causes."""
    seen: set[int] = set()  # ids: an exception need not have a hash
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__


def first_leaf(error: BaseException) -> BaseException:
    """The first exception inside nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
