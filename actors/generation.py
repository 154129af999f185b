"""What the sampler asks of an engine: plain calls, made one after another on the accelerator."""

from typing import Any, Literal, Protocol

from trouper.channels import Turn
from trouper.learner.engine import Finished, Request


class GenerationEngine(Protocol):
    """What the sampler needs of `trouper.learner.engine.Engine`."""

    def check(self, request: Request) -> None:
        """Raise `SamplerError` for a request that can never be served."""

    def submit(self, request: Request) -> None:
        """Queue a request."""

    @property
    def needs_prefill(self) -> bool:
        """Whether there is anything to prefill."""

    @property
    def can_decode(self) -> bool:
        """Whether there is anything to decode."""

    def prefill(self) -> None:
        """Admit what waits, compute a bounded part of the contexts' keys and values."""

    def decode(self) -> list[Finished]:
        """Decode one chunk, return what ended."""

    def swap(self, params: Any, version: tuple[int, int], kv: Literal["keep", "recompute"]) -> None:
        """Sample under other weights from now on."""

    def abort(self, id: int) -> Turn | None:
        """End a request; what was sampled of it so far, if anything."""

    def cancel(self, id: int) -> None:
        """Forget a request."""

    def release(self, conversation: int) -> None:
        """Forget a conversation's keys and values."""

    def warm_up(self) -> None:
        """Compile every shape."""

    def checksum(self) -> int:
        """Of the parameters in use, in the engine's own dtype and layout."""
