"""What a run is: frozen structs that mirror the TOML file section by section. No reading, no checking.

`trouper.actors.config_file` reads and refuses; `trouper.actors.plan` derives the numbers that follow.
Seconds are floats named without a suffix.
"""

from typing import Any, Literal

from msgspec import Struct

from trouper.learner.loss import LossConfig
from trouper.learner.mesh import MeshConfig, PlacementConfig
from trouper.learner.optimizer import OptimizerConfig


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. Unknown keys are refused."""


class Run(Section, frozen=True):
    """`[run]`.

    Attributes:
        name: the run directory is `directory/name`.
        directory: where run directories are kept.
        seed: every draw, attempt and sampled token follows from it.
        max_restarts: restarts after a failure within `restart_window`, of the learning and of the samplers each,
            before the run fails.
        restart_window: seconds.
    """

    name: str = "run"
    directory: str = "runs"
    seed: int = 0
    max_restarts: int = 3
    restart_window: float = 3600.0


class Model(Section, frozen=True):
    """`[model]`: `source` or `scratch`, not both.

    Attributes:
        source: an HF folder, a hub id, a `.gguf` file, or `package://PACKAGE/FILE.gguf`.
        scratch: fields of `trouper.learner.ModelConfig` for a model from random weights; `vocab_size` follows from
            the chat format.
        param_dtype: what parameters and optimizer moments are stored in.
        compute_dtype: what matrices are multiplied in.
        remat: recompute blocks in the backward pass: less memory, one more forward pass.
    """

    source: str | None = None
    scratch: dict[str, Any] | None = None
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False


class Chat(Section, frozen=True):
    """`[chat]`: how messages become token ids.

    Attributes:
        format: `auto` takes the model's own template; `plain` is one id per character, for models from scratch.
        alphabet: `plain` only: the characters, in id order.
        stop: `plain` only: the character that ends a turn.
        on_rewrite: when a template rewrites earlier turns (as those do that drop old thinking): `fork` starts a new
            row with the prompt exactly as rendered, `append` keeps the sampled ids and appends what is new.
    """

    format: Literal["auto", "chatml", "plain"] = "auto"
    alphabet: str = ""
    stop: str = ""
    on_rewrite: Literal["fork", "append"] = "fork"


class Tasks(Section, frozen=True):
    """`[tasks]`.

    Attributes:
        source: a `.jsonl` file, or the dotted name of a factory whose result has `task(draw)`.
        arguments: keywords for the factory.
        epochs: passes over a file; without end when left out. A factory decides itself.
        shuffle: draw a file's lines in a new seeded order each epoch.
    """

    source: str
    arguments: dict[str, Any] = {}
    epochs: int | None = None
    shuffle: bool = True


class Environment(Section, frozen=True):
    """`[environment]`.

    Attributes:
        name: dotted name of the class or factory; it is called with `arguments` for every life of an environment.
        arguments: keywords for it.
        create_timeout: seconds it may take to be made.
        reset_timeout: seconds `reset` may take.
        step_timeout: seconds one `step` or tool call may take.
        reward_timeout: seconds `reward` and the reward functions may take, each.
        close_timeout: seconds `close` may take, also at the end of the run.
        isolation: where plain (not async) methods run: `thread`, or `inline` on the event loop, which saves 0.1 ms a
            call and lets a call that hangs hang the run. `process` runs each environment, async or not, in a process
            of its own, which can be killed; it is made there from its dotted name.
        async_library: what its async methods are written for: `trio`, or `asyncio`, whose loop then runs in a thread
            (or in the environment's process).
        max_memory_mib: address space of an environment's process and of each it starts; 0 is no limit.
        max_cpu_seconds: CPU time of each of these processes; 0 is no limit.
        max_processes: processes an environment may have at a time, its own included.
        restart_backoff: seconds before the second restart in a row; doubles each time.
        restart_backoff_max: the longest wait between restarts, in seconds.
        max_abandoned_threads: calls, and agents, that do not end at their deadline leave a thread or a task behind;
            more than this end the run.
    """

    name: str = "trouper.envs.single_turn:SingleTurn"
    arguments: dict[str, Any] = {}
    create_timeout: float = 60.0
    reset_timeout: float = 60.0
    step_timeout: float = 60.0
    reward_timeout: float = 60.0
    close_timeout: float = 3.0
    isolation: Literal["thread", "inline", "process"] = "thread"
    async_library: Literal["trio", "asyncio"] = "trio"
    max_memory_mib: int = 0
    max_cpu_seconds: float = 0.0
    max_processes: int = 32
    restart_backoff: float = 0.1
    restart_backoff_max: float = 10.0
    max_abandoned_threads: int = 16


class Agent(Section, frozen=True):
    """`[agent]`.

    Attributes:
        name: dotted name of a factory that returns an agent.
        arguments: keywords for it.
    """

    name: str = "trouper.envs.agents:model_agent"
    arguments: dict[str, Any] = {}


class Reward(Section, frozen=True):
    """`[reward]`.

    Attributes:
        functions: dotted names; their weighted sum is added to what the environment itself gives.
        weights: one per function; 1 each when empty.
    """

    functions: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


class Sampling(Section, frozen=True):
    """`[sampling]`.

    Attributes:
        temperature: of training samples.
        top_p: of evaluation samples; training keeps every token.
        top_k: of evaluation samples; 0 keeps every token.
        max_prompt_tokens: a longer first prompt is a context overflow.
        max_response_tokens: most tokens of one model call.
        max_turns: most model calls of one episode.
        max_context_tokens: most tokens of one conversation; the KV cache's length.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_prompt_tokens: int = 512
    max_response_tokens: int = 128
    max_turns: int = 1
    max_context_tokens: int = 1024


class Engine(Section, frozen=True):
    """`[engine]`: the generation engine.

    Attributes:
        slots: conversations decoded side by side.
        chunk: tokens decoded between two admissions.
        prefill_rows: conversations prefilled in one call.
        prefill_tokens: tokens prefilled per conversation in one call.
        kv_dtype: what keys and values are cached in.
    """

    slots: int = 32
    chunk: int = 8
    prefill_rows: int = 8
    prefill_tokens: int = 64
    kv_dtype: Literal["float32", "bfloat16"] = "float32"


class Rollout(Section, frozen=True):
    """`[rollout]`.

    Attributes:
        num_generations: members of a group.
        max_concurrency: episodes that run at the same time.
        max_staleness: how many steps old the weights may be that sampled a trained token; 0 is exactly on-policy.
        on_late: what becomes of a group that others have overtaken: `wait` trains in the order of drawing and begins
            nothing that could get too old meanwhile; `drop` trains in the order of completion and throws away what is
            too old by then. That is faster where few episodes take far longer than the rest, and trains fewer of them.
        episode_timeout: seconds one attempt may take.
        max_attempts: tries of one member before it is lost.
        lost_members: `shrink` keeps a group with at least `min_members`, `drop` gives the slot another task.
        min_members: see `lost_members`.
        dynamic_sampling: replace groups whose rewards are all equal.
        max_redraws: how often a slot may get another task; what is dropped for being late does not count.
        mask_truncated: train nothing on episodes that were cut short.
        quarantine_after: groups of a task that lost every member before it is not drawn again; 0 never.
        max_consecutive_lost: attempts lost in a row before the run is called hopeless.
        max_lost_fraction: share of the last 256 attempts lost before the run is called hopeless.
    """

    num_generations: int = 8
    max_concurrency: int = 64
    max_staleness: int = 1
    on_late: Literal["wait", "drop"] = "wait"
    episode_timeout: float = 600.0
    max_attempts: int = 3
    lost_members: Literal["shrink", "drop"] = "drop"
    min_members: int = 2
    dynamic_sampling: bool = False
    max_redraws: int = 3
    mask_truncated: bool = False
    quarantine_after: int = 1
    max_consecutive_lost: int = 64
    max_lost_fraction: float = 0.5


class Train(Section, frozen=True):
    """`[train]`.

    Attributes:
        max_steps: optimizer steps; None trains until the data ends.
        groups_per_step: prompts per optimizer step.
        micro_batch_size: packed rows per device call; never changes the gradient.
        row_tokens: length of a packed row; 0 takes what a whole group may need, at most 2048 unless one conversation
            is longer. A group that does not fit is split, and its prompt computed once for each part.
        num_iterations: optimizer steps over the same episodes.
        advantage_estimator: `grpo`, `dr_grpo` or `rloo`.
        scale_rewards: divide advantages by the standard deviation of the group, of the whole step, or not.
        drop_last: leave out a last step that is short of groups.
        max_empty_steps: steps in a row without anything to learn from before the run is called hopeless.
    """

    max_steps: int | None = None
    groups_per_step: int = 8
    micro_batch_size: int = 4
    row_tokens: int = 0
    num_iterations: int = 1
    advantage_estimator: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    drop_last: bool = False
    max_empty_steps: int = 10


class Sync(Section, frozen=True):
    """`[sync]`: how new weights reach the samplers.

    Attributes:
        mode: `in_flight` swaps between two decode chunks; `drain` lets running generations end first, and at
            `drain_timeout` does as `abort`; `abort` takes running generations back and goes on with them, from the
            tokens they have, under the new weights.
        weight_sync_steps: optimizer steps between two publications.
        kv: `keep` goes on with keys and values of the older weights, `recompute` makes them again.
        drain_timeout: seconds generations may take to end before the swap is made all the same.
        timeout: seconds a sampler may take to attest new weights.
    """

    mode: Literal["in_flight", "drain", "abort"] = "in_flight"
    weight_sync_steps: int = 1
    kv: Literal["keep", "recompute"] = "keep"
    drain_timeout: float = 60.0
    timeout: float = 300.0


class Evaluation(Section, frozen=True):
    """`[evaluation]`: episodes on held-out tasks, beside training and without its slots.

    Attributes:
        every_steps: optimizer steps between two evaluations; 0 never evaluates.
        name: how its metrics are called: `eval/NAME/...`.
        tasks: where the tasks come from.
        count: how many tasks.
        samples: attempts per task; `pass@k` is reported for k = 1 and k = samples.
        temperature: 0 is greedy.
        pass_reward: a reward of at least this counts as passed.
        max_concurrency: evaluation episodes at the same time.
    """

    every_steps: int = 0
    name: str = "held_out"
    tasks: Tasks | None = None
    count: int = 64
    samples: int = 1
    temperature: float = 0.0
    pass_reward: float = 1.0
    max_concurrency: int = 32


class Checkpoint(Section, frozen=True):
    """`[checkpoint]`.

    Attributes:
        save_interval_steps: optimizer steps between two saves; 0 saves only at the end.
        max_to_keep: the newest so many are kept.
        keep_best: so many with the highest `best_metric` are kept beside them.
        best_metric: a metric of the step, or of the evaluation of its weights; a step without it, or with NaN, is never
            best.
    """

    save_interval_steps: int = 50
    max_to_keep: int = 3
    keep_best: int = 0
    best_metric: str = "reward/mean"


class Log(Section, frozen=True):
    """`[log]`.

    Attributes:
        episodes_per_step: episodes of a step written to `episodes.jsonl`.
        profile_steps: the first and the last step that `jax.profiler` traces into `profile/`; empty for none.
    """

    episodes_per_step: int = 2
    profile_steps: tuple[int, ...] = ()


class RunConfig(Section, frozen=True):
    """A whole run."""

    tasks: Tasks
    model: Model
    run: Run = Run()
    chat: Chat = Chat()
    environment: Environment = Environment()
    agent: Agent = Agent()
    reward: Reward = Reward()
    sampling: Sampling = Sampling()
    engine: Engine = Engine()
    rollout: Rollout = Rollout()
    train: Train = Train()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    placement: PlacementConfig = PlacementConfig()
    sync: Sync = Sync()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
