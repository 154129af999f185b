"""TRL's side of `calculator.py`; run by it, with a Python that has TRL.

    PYTHON calculator_trl.py MODEL_FOLDER METRICS_FILE SEED STEPS

Appends a line to the file after each step, as our own runs do: `{"step": 1, "exact": 0.25}`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

from calculator_task import (
    GROUPS_PER_STEP,
    LEARNING_RATE,
    MAX_RESPONSE_TOKENS,
    MEMBERS,
    Question,
    exact,
    messages,
    questions,
    reward,
)
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepLines(TrainerCallback):
    """Writes what each step reached."""

    def __init__(self, path: str) -> None:
        self.exact: list[bool] = []
        self._path = path

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """One line."""
        line = {"step": state.global_step, "exact": sum(self.exact) / len(self.exact)}
        self.exact.clear()
        with open(self._path, "a") as file:
            file.write(json.dumps(line) + "\n")


def main(model: str, path: str, seed: int, steps: int) -> None:
    """Train until the steps are done, or the one who asked has seen enough."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    lines = StepLines(path)

    def score(completions: Any, completion_ids: Any, question: Any, **_: Any) -> list[float]:
        rewards = []
        for completion, ids, fields in zip(completions, completion_ids, question, strict=True):
            asked = Question(int(fields[0]), int(fields[1]), fields[2])
            text, ended = completion[0]["content"], ids[-1] == tokenizer.eos_token_id
            lines.exact.append(exact(text, asked, ended=ended))
            rewards.append(reward(text, asked, ended=ended))
        return rewards

    config = GRPOConfig(
        output_dir=str(Path(path).with_suffix("")),
        max_steps=steps,
        seed=seed,
        use_cpu=True,
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        shuffle_dataset=False,
        per_device_train_batch_size=GROUPS_PER_STEP * MEMBERS,
        gradient_checkpointing=False,
        num_generations=MEMBERS,
        max_completion_length=MAX_RESPONSE_TOKENS,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=1e-4,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
    )
    asked = questions(GROUPS_PER_STEP * steps, seed)
    rows = [{"prompt": messages(each), "question": [str(field) for field in each]} for each in asked]
    GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[lines],
    ).train()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
