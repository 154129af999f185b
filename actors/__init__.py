"""The supervised tasks of a run, and what you compose your own from: the only place where Trio meets JAX.

    from trouper.actors import Graph, ON_ERROR, run

The standard run is loaded from `trouper.actors.launch`, which imports JAX; this door does not.
"""

from trouper.actors.child import ALWAYS, NEVER, ON_ERROR, Child, Restart
from trouper.actors.graph import Graph
from trouper.actors.run import run
from trouper.actors.supervisor import Strategy, Supervisor

__all__ = ["ALWAYS", "NEVER", "ON_ERROR", "Child", "Graph", "Restart", "Strategy", "Supervisor", "run"]
