"""Run TRL's GRPOTrainer on the sums once, in TRL's own environment: peer_trl.py starts this file.

Prints a JSON line per event, with the machine's monotonic clock.
"""

import json
import os
import sys
import time
from functools import partial

import common  # noqa: F401 (the project's root on sys.path)
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tasks import load_task

settings = json.loads(sys.argv[1])
torch.set_num_threads(len(os.sched_getaffinity(0)))
task = load_task("sums")
limit = settings["tokens"]  # of a response
tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
queries = {query.id: query for query in task.queries("train")}


def tell(**event) -> None:
    """Print an event for peer_trl.py, with the time."""
    print("EVENT " + json.dumps({"clock": time.monotonic()} | event), flush=True)


def reward(
    completions: list[str], id: list[int], completion_ids: list[list[int]], **_
) -> list[float]:
    """Score completions with the task. id: of the query of each, a column of the data set."""
    finished = [tokenizer.eos_token_id in ids or len(ids) < limit for ids in completion_ids]
    return task.score([queries[i] for i in id], completions, finished)


class Watch(TrainerCallback):
    """Reports each step and its reward."""

    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 0:
            tell()

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            tell(rows=settings["rows"], reward=float(logs["reward"]))


# More steps than there is time for: peer_trl.py ends the run.
schedule = dict(lr_scheduler_type="constant_with_warmup", warmup_steps=5, max_steps=1000)
optimizer = dict(learning_rate=settings["learning_rate"], max_grad_norm=1.0, seed=settings["seed"])
search = dict(num_generations=settings["group"], max_completion_length=limit)
search |= dict(temperature=settings["temperature"])
quiet = dict(logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True)
device = dict(use_cpu=True, bf16=False, gradient_checkpointing=False)
# A query's responses at once: with all rows a step took 58 s, not 40, and 10 GiB, not 4.
batch = dict(per_device_train_batch_size=settings["group"])
batch |= dict(gradient_accumulation_steps=settings["rows"] // settings["group"])
as_text = partial(tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True)
rows = [{"prompt": as_text(query.prompt), "id": query.id} for query in queries.values()]
trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
    reward_funcs=reward,
    args=GRPOConfig(
        settings["output_dir"], **batch, **schedule, **optimizer, **search, **quiet, **device
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[Watch()],
)
trainer.train()
