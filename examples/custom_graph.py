"""A graph of your own: a judge between the episodes and the grouper takes a fee for every guess.

Run it with `python examples/custom_graph.py`.
"""

import sys
from pathlib import Path

from msgspec.structs import replace

from trouper.actors import NEVER, ON_ERROR, Graph, Strategy
from trouper.actors.config_file import load_config
from trouper.actors.launch import launch
from trouper.actors.sampler import Generate
from trouper.actors.standard import StandardRun
from trouper.channels import Attempt, Episode, Group, Outcome, Receiver, Sender, Weights


async def judge(inbox: Receiver[Outcome], outbox: Sender[Outcome]) -> None:
    """Pass everything on; where there is an episode with a reward, judge it."""
    async for outcome in inbox:
        if isinstance(outcome, Episode) and outcome.reward is not None:
            outcome = replace(outcome, reward=outcome.reward - 0.02 * outcome.turns)
        await outbox.send(outcome)


def judged(run: StandardRun) -> Graph:
    """The standard actors, and the judge."""
    graph = Graph("judged")
    tasks = graph.channel("tasks", Attempt, capacity=8)
    raw, judged = (graph.channel(name, Outcome, capacity=256) for name in ("raw", "judged"))
    groups = graph.channel("groups", Group, capacity=32)
    weights = graph.channel("weights", Weights, capacity=1)
    requests = graph.channel("requests", Generate, capacity=256)
    graph.actor("sampler", run.sampler.run, requests=requests, restart=ON_ERROR, start_timeout=600)
    graph.actor("barrier", run.barrier.run, inbox=weights, restart=NEVER)
    # Whatever lies between source and trainer fails as one, and goes on from the last checkpoint as one.
    with graph.domain("learning", strategy=Strategy.ONE_FOR_ALL):
        graph.actor("trainer", run.train, inbox=groups, outbox=weights, restart=ON_ERROR, start_timeout=600, grace=60)
        graph.actor("grouper", run.group, inbox=judged, outbox=groups, restart=ON_ERROR)
        graph.actor("judge", judge, inbox=raw, outbox=judged, restart=ON_ERROR)
        graph.actor("episodes", run.episodes.run, inbox=tasks, outbox=raw, requests=requests, restart=ON_ERROR)
        graph.actor("source", run.draw, outbox=tasks, voids=judged, restart=ON_ERROR)
    return graph


if __name__ == "__main__":
    config = load_config(Path(__file__).with_name("guess.toml"), ["run.name=judged", *sys.argv[1:]])
    sys.exit(launch(config, run_dir=Path(config.run.directory) / config.run.name, wire=judged))
