"""How far AdamW moves weights in fp32 and in bf16, at the rate and schedule of GSM8K's figure1.

    python benchmarks/master_weights.py        # 80 s on 2 cores
    python benchmarks/master_weights.py --quick    # a hundredth of the weights

A million weights from N(0, 0.02), as a model's are, get the 700 gradients of a made-up run: a
constant sign for each weight, times the signal, plus unit noise. In bf16 weights, gradients and
both moments are bf16. A step of 1e-5 then rounds away, but for small weights. The fused AdamW,
ours, computes in fp32 and rounds its results; foreach, torch's default, rounds every operation.
"""

import torch
from common import arguments, mean_and_each, save, show, table_of

from config import Config
from learner import lr_schedule
from tasks.gsm8k import FIGURE_1

WEIGHTS, SEEDS, SIGNALS = 1_000_000, (0, 1, 2), (0.1, 0.03)
KINDS = {"fp32": (torch.float32, "fused")}
KINDS |= {f"bf16, {how}": (torch.bfloat16, how) for how in ("fused", "foreach")}


def simulate(kind: str, signal: float, seed: int, size: int) -> tuple[float, float, float]:
    """Train a made-up run. Returns how far weights moved, and the share that did.

    How far: the root of the mean square, and the mean along the gradient's constant part.
    """
    dtype, implementation = KINDS[kind]
    config, generator = Config(**FIGURE_1), torch.Generator().manual_seed(seed)
    weights = torch.nn.Parameter((0.02 * torch.randn(size, generator=generator)).to(dtype))
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
    quick = arguments(__doc__).quick
    size, rows = WEIGHTS // 100 if quick else WEIGHTS, []
    for signal in SIGNALS:
        # By kind: (3, seeds).
        runs = {k: list(zip(*(simulate(k, signal, s, size) for s in SEEDS))) for k in KINDS}
        for kind, (distances, along, shares) in runs.items():
            ratios = [[a / b for a, b in zip(*pair)] for pair in zip(runs["fp32"], runs[kind])]
            row = {
                "signal": str(signal),
                "weights and moments": kind,
                "moved, rms": f"{sum(distances) / len(SEEDS):.2e}",
                "along the signal": f"{sum(along) / len(SEEDS):.2e}",
                "share that moved": mean_and_each(shares),
                "fp32 moves so many times as far: rms": mean_and_each(ratios[0]),
                "fp32, along the signal": mean_and_each(ratios[1]),
            }
            rows.append(show(row))
    caption = f"{size} weights, seeds {SEEDS}; the mean, and each seed."
    save("master_weights", quick, caption, table_of(rows))


if __name__ == "__main__":
    main()
