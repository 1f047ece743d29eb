"""Train a real language model on old batches: by tb, by what its authors found since, by grpo.

    python benchmarks/stale_sums.py            # twelve runs of 100 steps: three hours on 2 cores
    python benchmarks/stale_sums.py --quick    # one seed

Needs SmolLM2-135M-Instruct (make demo-smollm installs it). Each run is that of tba.py sums, but
with batches that are AGE steps old and one learning rate for all, constant. Runs are kept in
--runs_dir; one that was cut off is resumed. What is measured besides is of the saved policies: the
KL to the base model, as tba_ema has no reference policy; and pass@k, of samples as in training.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from common import ROOT, arguments, as_flags, means, results_dir, save, steps_of, table_of

from config import Config
from launch.command_line import find_presets
from launch.files import read_metrics
from models.logprobs import response_logprobs
from models.policy import load_policy
from models.tokens import encode_prompt, load_tokenizer
from tasks import load_task

OBJECTIVES = ("tb", "tb_anchored", "tba_ema", "grpo")
AGE, STEPS, WINDOW, SEEDS, SAMPLES = 10, 100, 10, (0, 1, 2), 8
SETTINGS = dict(constant_staleness=AGE, steps=STEPS, lr_schedule="constant", checkpoint_every=20)
SETTINGS |= dict(stable_steps=0, decay_steps=0)
CURVES = "reward", "log_w_5"  # that are kept of each run, in results/stale_sums.jsonl


def tba(*words: object) -> str:
    """Run tba.py; returns what it prints."""
    command = [sys.executable, str(ROOT / "tba.py"), *map(str, words)]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def make_run(output: Path, objective: str, seed: int) -> None:
    """Make a run, or go on with it."""
    if any(output.glob("checkpoints/step-*")):
        tba("--resume", output)
    else:
        shutil.rmtree(output, ignore_errors=True)
        tba("sums", *as_flags(loss=objective, seed=seed, output_dir=output, **SETTINGS))
    shutil.rmtree(output / "checkpoints")


@torch.no_grad()
def kl_to_base(output: Path) -> float:
    """Estimate KL(policy || base model) of the saved policy, nats a response, by its samples."""
    preset, task = find_presets("sums")["smollm"], load_task("sums")
    configs = [Config(model=str(model)) for model in (output / "model", task.base_model())]
    policy, base = (load_policy(config, torch.device("cpu")) for config in configs)
    tokenizer, temperature, nats = load_tokenizer(configs[0]), preset["temperature"], []
    torch.manual_seed(0)
    for query in task.queries("test"):
        prompt = torch.tensor([encode_prompt(tokenizer, query.prompt)])
        how = dict(do_sample=True, temperature=temperature, top_k=0, num_return_sequences=SAMPLES)
        limit = preset["max_response_tokens"]
        mask = torch.ones_like(prompt)
        made = policy.generate(prompt, attention_mask=mask, max_new_tokens=limit, **how)
        rows = made[:, prompt.shape[1] :].numpy()
        ends = [np.flatnonzero(row == tokenizer.eos_token_id) for row in rows]
        rows = [row[: end[0] + 1] if len(end) else row for row, end in zip(rows, ends)]
        prompts = [prompt[0].numpy()] * SAMPLES
        both = [response_logprobs(one, prompts, rows, temperature).sum(1) for one in (policy, base)]
        nats += (both[0] - both[1]).tolist()
    return float(np.mean(nats))


def pass_at_k(model: Path | str) -> dict[str, float]:
    """Evaluate a model by samples as in training."""
    samples = dict(evaluation_samples=SAMPLES)
    samples["evaluation_temperature"] = find_presets("sums")["smollm"]["temperature"]
    text = tba("sums", "--eval_only", *as_flags(model=model, **samples))
    return {name: v for name, (v, *_) in json.loads(text.splitlines()[-1])["metrics"].items()}


def measure(output: Path, curves: dict[str, list]) -> dict[str, float]:
    """Measure a run by the titles of its columns. What its policy does is kept beside it."""
    kept = output / "measured.json"
    if not kept.exists():
        kept.write_text(json.dumps(pass_at_k(output / "model") | {"kl": kl_to_base(output)}))
    found = json.loads(kept.read_text())
    rewards, falls = np.array([*curves.values()], dtype=float)  # None where a step was bad: nan
    smooth = np.convolve(rewards, np.ones(WINDOW) / WINDOW, "valid")
    return {
        "reward, best": float(smooth.max()),
        "at the end": float(smooth[-1]),
        "largest fall": float((np.maximum.accumulate(smooth) - smooth).max()),
        "rows fall to": float(falls.min()),
        "greedy accuracy": read_metrics(str(output))[-1]["final_accuracy"],
        "KL to the base model": found["kl"],
        "pass@1": found["pass@1"],
        f"pass@{SAMPLES}": found[f"pass@{SAMPLES}"],
    }


def main() -> None:
    given = arguments(__doc__, ("--runs_dir", "runs/stale_sums"))
    found, lines = {objective: [] for objective in OBJECTIVES}, []
    for seed in SEEDS[: 1 if given.quick else None]:
        for objective in OBJECTIVES:
            output = Path(given.runs_dir).resolve() / f"{objective} {seed}"
            metrics = read_metrics(str(output))
            if not any("final_accuracy" in line for line in metrics):
                make_run(output, objective, seed)
            steps = steps_of(output)
            curves = {name: [step[name] for step in steps] for name in CURVES}
            lines.append(json.dumps({"objective": objective, "seed": seed} | curves) + "\n")
            found[objective].append(measure(output, curves))
            print(objective, seed, found[objective][-1], flush=True)
    rows = [{"": f"`{objective}`"} | means(runs) for objective, runs in found.items()]
    base = pass_at_k(load_task("sums").base_model())
    save(
        "stale_sums",
        given.quick,
        f"SmolLM2-135M-Instruct on sums, {STEPS} steps on batches {AGE} steps old, at the rate and "
        f"β of the preset. Rewards are means over {WINDOW} batches; the largest fall is from the "
        f"highest of them before; rows fall to the lowest that a step had as 5th percentile of "
        f"log π / b, nats; the rest is of the saved policy. pass@k is of {SAMPLES} samples to each "
        f"held-out query. The base model has pass@1 {base['pass@1']:.3f} and pass@{SAMPLES} "
        f"{base[f'pass@{SAMPLES}']:.3f}. Mean, and the seeds' values:",
        table_of(rows),
    )
    (results_dir(given.quick) / "stale_sums.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
