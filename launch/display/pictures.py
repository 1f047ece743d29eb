"""The pictures of a run: curves.png, timeline.png, and timeline.json for a trace viewer."""

import io
import json
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave

from launch.files import find_evaluations, read_metrics, read_spans

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


def draw(run_dir: str) -> dict[str, bytes]:
    """Draw what the processes have written so far: title -> the picture of one panel, as PNG.

    Saves curves.png and timeline.png, which have several panels, and timeline.json.
    """
    parts = save(draw_curves(run_dir), run_dir, "curves.png")
    if spans := read_spans(run_dir):  # else logs/ was removed: the timeline may still be there
        parts |= save(draw_timeline(run_dir, spans), run_dir, "timeline.png")
    return parts


def save(figure: Figure, run_dir: str, name: str) -> dict[str, bytes]:
    """Save a figure whole, and return its parts, which a narrow screen shows below each other."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = np.asarray(canvas.buffer_rgba())
    imsave(Path(run_dir, name), image)
    parts = {}
    for part in figure.subfigs:
        left, bottom, right, top = part.bbox.extents.round().astype(int)
        buffer = io.BytesIO()
        imsave(buffer, image[len(image) - top : len(image) - bottom, left:right], format="png")
        parts[part.axes[0].get_title()] = buffer.getvalue()
    return parts


def draw_curves(run_dir: str) -> Figure:
    """Draw a panel for each of PANELS, against the trainer step; smoothed, raw behind."""
    lines = read_metrics(run_dir)
    steps = [line for line in lines if "loss" in line]
    figure = Figure(figsize=(20, 6), dpi=120)
    panels = [part.subplots() for part in figure.subfigures(2, 5).flat]
    for part in figure.subfigs:
        part.subplots_adjust(left=0.19, right=0.98, bottom=0.17, top=0.9)
    for axis, (title, names) in zip(panels, PANELS.items()):
        for i, name in enumerate(names):
            points = [(line["step"], line[name]) for line in steps if name in line]
            raw = np.array(points or [(np.nan, np.nan)], float).T
            width = max(1, len(points) // STRETCHES)
            smooth = np.lib.stride_tricks.sliding_window_view(raw, width, axis=1).mean(axis=2)
            axis.plot(*raw, color=f"C{i}", alpha=0.25)
            axis.plot(*smooth, color=f"C{i}", label=name)
        axis.set_title(title, fontsize="medium")
        axis.set_xlabel("trainer step")
        axis.yaxis.set_major_formatter("{x:g}")  # no factor such as 1e-7 over the title
        if len(names) > 1:
            axis.legend()
    if evaluations := list(find_evaluations(lines)):
        metric = evaluations[0][1].removeprefix("final_")  # a final evaluation may have several
        points = [
            (step, value, *(ends or (value, value)))
            for step, name, value, ends in evaluations
            if name.removeprefix("final_") == metric
        ]
        at, values, low, high = np.array(points, float).T
        panels[0].plot(at, values, "o-", color="C3", label=f"{metric}, test queries, 95 %")
        panels[0].vlines(at, low, high, color="C3")
        panels[0].legend()
    return figure


def draw_timeline(run_dir: str, spans: dict[str, list[tuple[str, float, float]]]) -> Figure:
    """Draw the whole run, and three steps or a second from its middle.

    Writes timeline.json too, a Chrome trace (open it in ui.perfetto.dev). spans: by process.
    """
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
    figure = Figure(figsize=(9, 2.8 + 0.4 * len(spans)), dpi=120, layout="constrained")
    whole, detail = (part.subplots() for part in figure.subfigures(1, 2))
    for row, rows in enumerate(spans.values()):
        draw_shares(whole, row, rows, end)
        near = [span for span in rows if span[1] < beyond and span[2] > middle]
        for name, color in COLORS.items():
            bars = [(start, stop - start) for span, start, stop in near if span == name]
            height = (-row - 0.4, 0.8)
            detail.broken_barh(bars, height, color=color, edgecolor="white", linewidth=0.5)
    titles = "the whole run: share of each activity", f"{beyond - middle:.0f} s from its middle"
    ends = (0.0, end), (middle, beyond)
    for axis, title, xlim, part in zip((whole, detail), titles, ends, figure.subfigs):
        axis.set(title=title, xlabel="seconds", xlim=xlim)
        axis.set_yticks([-row for row in range(len(spans))], list(spans))
        part.legend(*whole.get_legend_handles_labels(), ncols=3, loc="outside lower center")
    return figure


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


def draw_shares(axis: Axes, row: int, rows: list[tuple[str, float, float]], end: float) -> None:
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
