"""How far AdamW moves weights in fp32 and in bf16, at the rate and schedule of GSM8K's figure1.

    python benchmarks/master_weights.py        # 80 s on 2 cores

A million weights from N(0, 0.02), as a model's are, get the 700 gradients of a made-up run: a
constant sign for each weight, times the signal, plus unit noise. In bf16 weights,
gradients and both moments are bf16. A step of 1e-5 then rounds away, but for small weights. The
fused AdamW, ours, computes in fp32 and rounds its results; foreach, torch's default, rounds every
operation. Writes benchmarks/results/master_weights.md.
"""

import torch
from common import mean_and_values, save, table

from config import Config
from models.schedules import lr_schedule
from tasks.gsm8k import FIGURE_1

WEIGHTS, DEVIATION, SEEDS, SIGNALS = 1_000_000, 0.02, (0, 1, 2), (0.1, 0.03)
KINDS = {
    "fp32": (torch.float32, "fused"),
    "bf16, fused": (torch.bfloat16, "fused"),
    "bf16, foreach": (torch.bfloat16, "foreach"),
}


def simulate(kind: str, signal: float, seed: int, size: int = WEIGHTS) -> tuple[float, ...]:
    """Train a made-up run. Returns how far weights are from where they began, and how many moved.

    The root of the mean square of all distances; their mean along the gradient's constant part; the
    share of the weights that are not where they were.
    """
    dtype, implementation = KINDS[kind]
    config, generator = Config(**FIGURE_1), torch.Generator().manual_seed(seed)
    weights = torch.nn.Parameter((DEVIATION * torch.randn(size, generator=generator)).to(dtype))
    before = weights.detach().float().clone()
    signs = torch.randn(size, generator=generator).sign()
    rate = dict(lr=config.learning_rate, weight_decay=config.weight_decay)
    optimizer = torch.optim.AdamW([weights], **rate, **{implementation: True})
    schedule = lr_schedule(optimizer, config)
    for _ in range(config.steps):
        weights.grad = (signal * signs + torch.randn(size, generator=generator)).to(dtype)
        optimizer.step()
        schedule.step()
    moved = weights.detach().float() - before
    along = -(moved * signs).mean()  # downhill
    return moved.square().mean().sqrt().item(), along.item(), (moved != 0).float().mean().item()


def main() -> None:
    lines = []
    for signal in SIGNALS:
        runs = {kind: [simulate(kind, signal, seed) for seed in SEEDS] for kind in KINDS}
        for kind, found in runs.items():
            distance, along, share = map(list, zip(*found))
            ratios = (
                [one[column] / other[column] for one, other in zip(runs["fp32"], found)]
                for column in (0, 1)
            )
            distances = [f"{sum(values) / len(SEEDS):.2e}" for values in (distance, along)]
            cells = [*distances, *map(mean_and_values, (share, *ratios))]
            lines.append([str(signal), kind, *cells])
            print(" | ".join(lines[-1]), flush=True)
    heads = ["signal", "weights and moments", "moved, rms", "along the signal", "share that moved"]
    heads += ["fp32 moves so many times as far: rms", "along the signal"]
    save(
        "master_weights",
        False,
        f"{WEIGHTS} weights, seeds {SEEDS}; the mean, and each seed.",
        table(heads, lines),
    )


if __name__ == "__main__":
    main()
