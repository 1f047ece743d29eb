"""Run TRL's GRPOTrainer once, in TRL's own environment: peer_trl.py starts this file.

Prints a JSON line per event, with the machine's monotonic clock.
"""

import json
import sys
import time

import common  # noqa: F401 (the project's root on sys.path)
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tasks import load_task

settings = json.loads(sys.argv[1])
torch.set_num_threads(settings["threads"])
task = load_task(settings["task"])
tokenizer = AutoTokenizer.from_pretrained(settings["model"])
tokenizer.padding_side = "left"
queries = {query.id: query for query in task.queries("train")}
tests = task.queries("test")


def tell(**event) -> None:
    """Print an event for peer_trl.py, with the time."""
    print("EVENT " + json.dumps({"clock": time.monotonic()} | event), flush=True)


def reward(
    completions: list[str], id: list[int], completion_ids: list[list[int]], **_
) -> list[float]:
    """Score completions with the task. id: of the query of each, a column of the data set."""
    limit = settings["max_response_tokens"]
    finished = [tokenizer.eos_token_id in ids or len(ids) < limit for ids in completion_ids]
    return task.score([queries[i] for i in id], completions, finished)


class Watch(TrainerCallback):
    """Reports each step and its reward, and ends the training when its time is up."""

    def on_step_begin(self, args, state, control, **_):
        tell(step=state.global_step)

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            tell(step=state.global_step, reward=float(logs["reward"]))

    def on_step_end(self, args, state, control, **_):
        if time.monotonic() > settings["until"]:
            control.should_training_stop = True


trainer = GRPOTrainer(
    model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir=settings["output_dir"],
        per_device_train_batch_size=settings["rows"],
        num_generations=settings["responses_per_query"],
        max_completion_length=settings["max_response_tokens"],
        temperature=1.0,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="linear",
        warmup_steps=10,
        max_steps=settings["steps"],
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=settings["seed"],
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(
        [{"prompt": query.prompt, "id": query.id} for query in queries.values()]
    ),
    processing_class=tokenizer,
    callbacks=[Watch()],
)
trainer.train()
if settings["evaluate"]:
    with torch.no_grad():
        ids = tokenizer([query.prompt for query in tests], return_tensors="pt", padding=True)
        out = trainer.model.eval().generate(
            **ids, do_sample=False, max_new_tokens=settings["max_response_tokens"]
        )
    out = out[:, ids.input_ids.shape[1] :]  # the responses alone
    finished = (out == tokenizer.eos_token_id).any(1).tolist()
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    tell(accuracy=sum(task.score(tests, texts, finished)) / len(tests))
