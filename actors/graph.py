"""Actor graphs: declare channels and actors, have the wiring checked, draw it, run it under supervision.

An actor is an async function over its ends; which parameter sends and which receives follows from its annotations
(`Receiver[X]`, `Sender[X]`). The graph owns the channels and lends clones to each life of an actor:

- An actor that crashes leaves its neighbours in backpressure until it is back; only the message in its hand is lost.
- When every producer of a channel is over for good, the channel is finished: that is the only end-of-data marker.
- When every consumer of a channel is over for good, sending into it raises `trio.BrokenResourceError`, which fails
  the producer by name instead of leaving it to wait for ever.
- An actor that returns before any of its inboxes has ended, unasked, has failed, unless it is `significant`.
- When a group restarts (ONE_FOR_ALL, REST_FOR_ONE, or such a domain as a whole), who had returned begins again too,
  unless NEVER, and each channel that only they use is renewed: empty, open, nothing of the dead lives in it.
- An actor that returned keeps its claim on a channel as long as a restart could revive it without renewing that
  channel. So what crosses the border of a ONE_FOR_ALL domain ends with the domain, and what is inside ends as ever;
  do not lead data out of such a domain and back in, where its end would wait for itself.

Knows no particular actor; the standard training run is one graph among others.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, overload

import trio

from trouper.actors.child import NEVER, Child, Restart
from trouper.actors.heartbeat import Heartbeat
from trouper.actors.lending import Lending
from trouper.actors.mermaid import draw
from trouper.actors.supervisor import Strategy, Supervisor
from trouper.actors.watchdog import Watchdog
from trouper.actors.wiring import Actor, Domain, find_problems, read_ends
from trouper.channels import Channel, ChannelStatistics, Exited, GraphError

T = TypeVar("T")

log = logging.getLogger(__name__)


class Graph:
    """Channels and actors, checked before they start and run once.

    Args:
        name: how errors call it.
        strategy: who of the top-level actors and domains is restarted together.
        max_restarts: restarts allowed within `window` at the top level.
        window: seconds.
        seed: makes the jitter of restarts reproducible.
        on_exit: called with every `Exited` of an actor or domain; must be quick and not raise.
        note: told what the watchdog has to say; must be quick and not raise.

    Attributes:
        heartbeat: counts the incidents in which code blocked the event loop.
    """

    def __init__(
        self,
        name: str,
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        max_restarts: int = 3,
        window: float = 60.0,
        seed: int = 0,
        on_exit: Callable[[Exited], None] = lambda exited: None,
        note: Callable[[str], None] = log.warning,
    ) -> None:
        self.name = name
        self.heartbeat = Heartbeat()
        self._note = note
        self._root = Domain(name, strategy, max_restarts, window)
        self._stack = [self._root]
        self._seed = seed
        self._on_exit = on_exit
        self._channels: list[Channel[Any]] = []
        self._links: list[tuple[str, str, str]] = []
        self._supervisors: list[Supervisor] = []
        self._stop = trio.Event()

    # Declaring -----------------------------------------------------------------------------------------------

    @overload
    def channel(self, name: str, message_type: type[T], capacity: int) -> Channel[T]: ...
    @overload
    def channel(self, name: str, message_type: Any, capacity: int) -> Channel[Any]: ...
    def channel(self, name: str, message_type: Any, capacity: int) -> Channel[Any]:
        """Declare a bounded channel.

        Args:
            name: unique among the channels.
            message_type: what it carries; a union is allowed.
            capacity: most messages that wait in it.

        Raises:
            GraphError: the capacity is no whole number, or negative.
        """
        try:
            channel = Channel[Any](name, message_type, capacity)
        except ValueError as error:
            raise GraphError(f"graph {self.name!r}: {error}") from None
        self._channels.append(channel)
        return channel

    def actor(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        restart: Restart,
        grace: float = 5.0,
        significant: bool = False,
        replicas: int = 1,
        start_timeout: float = 60.0,
        **arguments: Any,
    ) -> None:
        """Declare an actor in the innermost open domain.

        Args:
            name: unique among actors and domains.
            function: an async function, bound method or callable object. Parameters named `stop` (a `trio.Event`, set
                when it should end) and `task_status` (call `started()` once it is ready) are filled in; without the
                latter it counts as up at once.
            restart: `ALWAYS`, `ON_ERROR` or `NEVER`.
            grace: seconds between the stop event and cancellation. A function without `stop` cannot hear the event
                and is cancelled at once.
            significant: when it ends for good, its domain ends and stops the others gracefully.
            replicas: run so many copies, named `name-0`, `name-1`, ...
            start_timeout: seconds it may take to come up.
            **arguments: channels for its ends; anything else is passed on as it is.
        """
        self._stack[-1].members.append(
            Actor(name, function, arguments, restart, grace, start_timeout, significant, replicas)
        )

    @contextmanager
    def domain(
        self,
        name: str,
        *,
        strategy: Strategy,
        max_restarts: int = 3,
        window: float = 60.0,
        restart: Restart = NEVER,
        significant: bool = False,
    ) -> Iterator[None]:
        """Actors declared inside form a failure domain of their own.

        Args:
            name: unique among actors and domains.
            strategy: who of them is restarted together.
            max_restarts: restarts allowed within `window`; beyond, the domain fails.
            window: seconds.
            restart: what the outer domain does then; `NEVER` lets the failure through.
            significant: when the domain ends, the outer one does.
        """
        domain = Domain(name, strategy, max_restarts, window, restart, significant)
        self._stack[-1].members.append(domain)
        self._stack.append(domain)
        try:
            yield
        finally:
            self._stack.pop()

    def link(self, source: str, target: str, label: str) -> None:
        """Declare an edge that never blocks its source (a reply, a newest value, a counter); it is only drawn."""
        self._links.append((source, target, label))

    # Looking -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the wiring.

        Raises:
            GraphError: lists everything that is wrong.
        """
        ends = [read_ends(actor) for actor in self._root.actors()]
        problems = find_problems(ends, self._channels, [domain.name for domain in self._root.domains()], self._links)
        if problems:
            raise GraphError("\n  - ".join([f"graph {self.name!r} cannot run:", *problems]))

    def mermaid(self) -> str:
        """The graph as a Mermaid flowchart: channels with capacities on the arrows, links dashed."""
        return draw(self._root, self._links)

    def statistics(self) -> list[ChannelStatistics]:
        """Every channel at this moment, in the order of declaration."""
        return [channel.statistics() for channel in self._channels]

    @property
    def restarts(self) -> int:
        """Restarts so far, in all domains."""
        return sum(supervisor.restarts for supervisor in self._supervisors)

    # Running -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask for the graceful stop: in reverse order each actor gets its stop event, its grace, then cancellation."""
        self._stop.set()

    async def run(self, *, task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED) -> None:
        """Check, start all actors in the order of declaration, and supervise them until they have all ended.

        Args:
            task_status: told once every actor has been up.

        Raises:
            GraphError: the wiring is wrong, or the graph has run before.
            Stalled: every task waited for another one, and nothing could end that.
            StartError, RestartLimit, Exception, ExceptionGroup: see `Supervisor.run`.
        """
        self.check()
        if self._supervisors:
            raise GraphError(f"graph {self.name!r} has run before and its channels are closed; build a new one")
        lending = Lending(self._root)
        supervisor = self._supervise(self._root, lending)
        watchdog = Watchdog(self.name, lending.ends, self._links, self.heartbeat, note=self._note)
        try:
            await watchdog.guard(partial(supervisor.run, self._stop, task_status=task_status), self.stop)
        finally:
            for channel in self._channels:
                channel.close()

    def _supervise(self, domain: Domain, lending: Lending) -> Supervisor:
        supervisor = Supervisor(
            domain.name,
            [
                self._domain_child(member, lending)
                if isinstance(member, Domain)
                else _actor_child(member, name, lending)
                for name, member in domain.children()
            ],
            strategy=domain.strategy,
            max_restarts=domain.max_restarts,
            window=domain.window,
            seed=self._seed,
            on_exit=self._on_exit,
        )
        self._supervisors.append(supervisor)
        return supervisor

    def _domain_child(self, domain: Domain, lending: Lending) -> Child:
        return Child(
            name=domain.name,
            run=self._supervise(domain, lending).run,
            restart=domain.restart,
            grace=math.inf,  # its children have their own
            start_timeout=math.inf,
            significant=domain.significant,
            ended=lambda: lending.give_back(domain.copies()),
            restarting=lambda: lending.renew(domain.name),
        )


def _actor_child(actor: Actor, copy: str, lending: Lending) -> Child:
    async def life(stop: trio.Event, *, task_status: "trio.TaskStatus[None]") -> None:
        await lending.live(copy, stop, task_status)

    return Child(
        name=copy,
        run=life,
        restart=actor.restart,
        grace=actor.grace if "stop" in lending.ends[copy].given else 0.0,
        start_timeout=actor.start_timeout,
        significant=actor.significant,
        ended=lambda: lending.give_back([copy]),
        restarting=lambda: lending.renew(copy),
    )
