"""What a configuration names: tasks, environment, agent, rewards, chat format. Found, checked, and put into a `Cast`.

Knows names and files, no model and no run.
"""

from functools import partial
from pathlib import Path
from typing import Any

from trouper.actors.config import RunConfig
from trouper.actors.config import Tasks as TaskSection
from trouper.actors.process import process_factory
from trouper.actors.standard import Cast
from trouper.channels import ConfigError
from trouper.envs import (
    Chat,
    PlainChat,
    Tasks,
    load_agent,
    load_chat,
    load_factory,
    load_rewards,
    load_tasks,
    made,
)


def look_up(config: RunConfig) -> None:
    """Find what the configuration names, as a start would. Reads files of tasks; loads no model, makes no environment.

    Raises:
        ConfigError: a name that cannot be found, arguments that do not fit, or a file of tasks that cannot be used.
    """
    for section in (config.tasks, config.evaluation.tasks):
        if section is not None and section.source.endswith(".jsonl"):
            task_stream(section, config.run.seed)
        elif section is not None:
            load_factory(section.source, _task_arguments(section, config.run.seed))
    load_factory(config.environment.name, config.environment.arguments)
    load_agent(config.agent.name, config.agent.arguments)
    load_rewards(config.reward.functions, config.reward.weights or None)
    if config.chat.format == "plain":
        load_format(config, None)


def load_cast(config: RunConfig, folder: Path | None) -> Cast:
    """Load what the configuration names.

    Raises:
        ConfigError: a name that cannot be found, or arguments that do not fit.
    """
    name, arguments = config.environment.name, config.environment.arguments
    load_factory(name, arguments)
    own = config.environment.isolation == "process"
    return Cast(
        chat=load_format(config, folder),
        tasks=task_stream(config.tasks, config.run.seed),
        held_out=held_out(config),
        make_environment=process_factory(config.environment, name) if own else partial(made, name, arguments),
        agent=load_agent(config.agent.name, config.agent.arguments),
        rewards=load_rewards(config.reward.functions, config.reward.weights or None),
    )


def load_format(config: RunConfig, folder: Path | None) -> Chat:
    """The chat format: the model's own, or one id per character."""
    if config.chat.format == "plain":
        return PlainChat(config.chat.alphabet, config.chat.stop)
    if folder is None:
        raise ConfigError('a model from scratch has no chat template; set chat.format = "plain" and chat.alphabet')
    return load_chat(folder, format=config.chat.format)


def task_stream(section: TaskSection, seed: int) -> Tasks:
    """The tasks that a section names; `seed` is that of the order."""
    return load_tasks(section.source, _task_arguments(section, seed))


def _task_arguments(section: TaskSection, seed: int) -> dict[str, Any]:
    if section.source.endswith(".jsonl"):
        return section.arguments | {"epochs": section.epochs, "shuffle": section.shuffle, "seed": seed}
    if section.epochs is not None or not section.shuffle:
        raise ConfigError(
            f"epochs and shuffle are for .jsonl files, and the tasks come from {section.source}: it decides about "
            "their order and their end itself; leave the keys out, or give it arguments"
        )
    return section.arguments


def held_out(config: RunConfig) -> Tasks | None:
    """The tasks to evaluate on, where there is an evaluation."""
    section = config.evaluation.tasks if config.evaluation.every_steps else None
    return None if section is None else task_stream(section, config.run.seed)
