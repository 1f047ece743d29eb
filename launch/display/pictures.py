"""The pictures of a run: curves.png, timeline.png, and timeline.json for a trace viewer."""

import json
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402 (after the choice of the backend)

from launch.files import find_evaluations, read_metrics, read_spans  # noqa: E402

COLORS = {
    "search": "tab:blue",
    "score": "tab:cyan",
    "reference": "tab:purple",
    "publish": "tab:orange",
    "load": "tab:olive",
    "wait": "lightgray",
    "receive": "tab:brown",
    "sample": "tab:pink",
    "step": "tab:green",
    "eval": "tab:red",
    "checkpoint": "black",
}
PANELS = {  # title, with the unit -> metrics; first what matters first
    "reward of new responses": ["reward"],
    "KL to the reference, nats a response": ["kl"],
    "entropy, nats a token": ["entropy"],
    "loss": ["loss"],
    "log Z, mean of the batch, nats": ["log_z"],
    "staleness, steps": ["staleness_mean", "staleness_in_flight", "staleness_in_buffer"],
    "effective sample size, share of the batch": ["ess_responses", "ess_tokens"],
    "log π / b of responses, nats, 5 and 95 %": ["log_w_5", "log_w_95"],
    "norm of the gradient": ["grad_norm"],
    "mismatch with vLLM, nats a token": ["mismatch"],
}
STRETCHES = 50  # of a run: a smoothed line is the mean over one of them
SHARES = 200  # parts of the run, in each of which the share of each activity is shown


def draw(run_dir: str) -> None:
    """Draw all pictures from what the processes have written so far."""
    draw_curves(run_dir)
    draw_timeline(run_dir)


def draw_curves(run_dir: str) -> None:
    """curves.png: a panel for each of PANELS, against the trainer step; smoothed, raw behind."""
    lines = read_metrics(run_dir)
    steps = [line for line in lines if "loss" in line]
    figure, axes = plt.subplots(2, 5, figsize=(20, 6), constrained_layout=True)
    for axis, (title, names) in zip(axes.flat, PANELS.items()):
        for i, name in enumerate(names):
            points = [(line["step"], line[name]) for line in steps if name in line]
            raw = np.array(points or [(0, 0)], float).T
            width = max(1, len(points) // STRETCHES)
            smooth = np.lib.stride_tricks.sliding_window_view(raw, width, axis=1).mean(axis=2)
            axis.plot(*raw, color=f"C{i}", alpha=0.25)
            axis.plot(*smooth, color=f"C{i}", label=name)
        axis.set(title=title, xlabel="trainer step")
        if len(names) > 1:
            axis.legend()
    reward = axes.flat[0]
    if evaluations := list(find_evaluations(lines)):
        metric = evaluations[0][1].removeprefix("final_")  # a final evaluation may have several
        points = [
            (step, value, *(ends or (value, value)))
            for step, name, value, ends in evaluations
            if name.removeprefix("final_") == metric
        ]
        at, values, low, high = np.array(points, float).T
        reward.plot(at, values, "o-", color="C3", label=f"{metric}, test queries, 95 %")
        reward.vlines(at, low, high, color="C3")
    reward.legend()
    figure.savefig(Path(run_dir) / "curves.png", dpi=80)
    plt.close(figure)


def draw_timeline(run_dir: str) -> None:
    """timeline.json, a Chrome trace (open it in ui.perfetto.dev), and timeline.png.

    The picture shows the whole run, and three steps or a second from its middle.
    """
    spans = read_spans(run_dir)
    if not spans and Path(run_dir, "timeline.png").exists():  # logs/ was removed since
        return
    zero = min((start for rows in spans.values() for _, start, _ in rows), default=0.0)
    spans = {
        process: [(name, start - zero, end - zero) for name, start, end in rows]
        for process, rows in spans.items()
    }
    write_trace(run_dir, spans)
    steps = [start for name, start, _ in spans.get("trainer", []) if name == "step"]
    shown = steps[len(steps) // 2 :][:4] or [0.0]
    middle, beyond = shown[0], max(shown[-1], shown[0] + 1.0)
    end = max((end for rows in spans.values() for *_, end in rows), default=1.0)
    size = (14, 3 + len(spans))
    figure, (whole, detail) = plt.subplots(2, 1, figsize=size, constrained_layout=True)
    for row, rows in enumerate(spans.values()):
        draw_shares(whole, row, rows, end)
        for name, color in COLORS.items():
            bars = [
                (start, stop - start)
                for span, start, stop in rows
                if span == name and start < beyond and stop > middle
            ]
            height = (-row - 0.4, 0.8)
            detail.broken_barh(bars, height, color=color, edgecolor="white", linewidth=0.5)
    names = {"yticks": [-row for row in range(len(spans))], "yticklabels": list(spans)}
    title = "the whole run: share of each activity"
    whole.set(title=title, xlabel="seconds", xlim=(0.0, end), **names)
    title = f"{beyond - middle:.0f} s from its middle"
    detail.set(title=title, xlabel="seconds", xlim=(middle, beyond), **names)
    figure.legend(ncols=len(COLORS), loc="outside lower center", frameon=False)
    figure.savefig(Path(run_dir) / "timeline.png", dpi=80)
    plt.close(figure)


def write_trace(run_dir: str, spans: dict[str, list[tuple[str, float, float]]]) -> None:
    """timeline.json, from spans whose clock begins at 0."""
    events = []
    for pid, (process, rows) in enumerate(spans.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
        for name, start, end in rows:
            times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}  # microseconds
            events.append({"ph": "X", "pid": pid, "tid": 0, "name": name} | times)
    with open(Path(run_dir) / "timeline.json", "w") as file:
        json.dump({"traceEvents": events}, file)


def draw_shares(axis, row: int, rows: list[tuple[str, float, float]], end: float) -> None:
    """A process over the whole run: single spans are thinner than a pixel, so show shares."""
    edges, base = np.linspace(0.0, end, SHARES + 1), np.full(SHARES, -row - 0.4)
    for name, color in COLORS.items():
        bars = [(start, stop - start) for span, start, stop in rows if span == name]
        times = [0.0] + [t for start, length in bars for t in (start, start + length)]
        spent = np.cumsum([0.0] + [t for _, length in bars for t in (0.0, length)])
        share = np.diff(np.interp(edges, times, spent)) / (edges[1] - edges[0])
        top, label = base + 0.8 * share, name if row == 0 else None
        axis.fill_between(edges[:-1], base, top, step="post", color=color, linewidth=0, label=label)
        base = top
