"""Draws an actor graph as a Mermaid flowchart; knows declarations only, and draws unsound graphs too."""

from collections.abc import Sequence

from trouper.actors.wiring import Actor, Domain, read_ends


def draw(root: Domain, links: Sequence[tuple[str, str, str]]) -> str:
    """The flowchart's source.

    Args:
        root: all actors; inner domains become subgraphs.
        links: non-blocking edges as (source, target, label), drawn dashed.
    """
    ids: dict[str, str] = {}
    lines = ["flowchart LR", *_nodes(root, ids, "    ")]
    actors = [read_ends(actor) for actor in root.actors()]
    for source in actors:
        for channel in source.channels("send"):
            for target in actors:
                if any(inbox is channel for inbox in target.channels("receive")):
                    label = _label(f"{channel.name} ({channel.capacity})")
                    lines.append(f"    {ids[source.actor.name]} -->|{label}| {ids[target.actor.name]}")
    for start, end, label in links:
        if start in ids and end in ids:
            lines.append(f"    {ids[start]} -.->|{_label(label)}| {ids[end]}")
    return "\n".join(lines) + "\n"


def _nodes(domain: Domain, ids: dict[str, str], indent: str) -> list[str]:
    lines = []
    for member in domain.members:
        ids[member.name] = node = f"n{len(ids)}"
        if isinstance(member, Actor):
            label = member.name if member.replicas == 1 else f"{member.name} × {member.replicas}"
            lines.append(f"{indent}{node}[{_label(label)}]")
        else:
            lines.append(f"{indent}subgraph {node}[{_label(f'{member.name}: {member.strategy.value}')}]")
            lines += _nodes(member, ids, indent + "    ")
            lines.append(f"{indent}end")
    return lines


def _label(text: str) -> str:
    return '"' + text.replace('"', "#quot;") + '"'
