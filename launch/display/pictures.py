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

ACTIVITIES = "search score step eval reference receive sample checkpoint publish load".split()
COLORS = {name: f"C{i}" for i, name in enumerate(ACTIVITIES)} | {"wait": "lightgray"}
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
SHARES = 400  # parts of a timeline, in each of which the share of each activity is shown
Spans = dict[str, list[tuple[str, float, float]]]  # by process: activity, its begin and end


def draw(run_dir: str) -> dict[str, bytes]:
    """Draw what the processes have written so far: title -> the picture of one panel, as PNG.

    Saves curves.png and timeline.png, which have several panels, and timeline.json.
    """
    parts = save(draw_curves(run_dir), Path(run_dir, "curves.png"))
    if spans := read_spans(run_dir):  # else logs/ was removed: the timeline may still be there
        zero = min((start for rows in spans.values() for _, start, _ in rows), default=0.0)
        for process, rows in spans.items():
            spans[process] = [(name, start - zero, end - zero) for name, start, end in rows]
        write_trace(Path(run_dir, "timeline.json"), spans)
        parts |= save(draw_timeline(spans), Path(run_dir, "timeline.png"))
    return parts


def save(figure: Figure, path: Path) -> dict[str, bytes]:
    """Save a figure whole, and return its parts, which a narrow screen shows below each other."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image, parts = np.asarray(canvas.buffer_rgba()), {}
    imsave(path, image)
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
    for part, (title, names) in zip(figure.subfigures(2, 5).flat, PANELS.items()):
        axis = part.subplots()
        part.subplots_adjust(left=0.19, right=0.98, bottom=0.17, top=0.9)
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
        if title == next(iter(PANELS)):
            draw_evaluations(axis, lines)
        if len(axis.lines) > 2:
            axis.legend()
    return figure


def draw_evaluations(axis: Axes, metrics: list[dict]) -> None:
    """Draw the task's metric on the test queries, with its intervals."""
    points: dict[str, list] = {}
    for step, name, value, ends in find_evaluations(metrics):
        metric = name.removeprefix("final_")
        points.setdefault(metric, []).append((step, value, *(ends or (value, value))))
    for metric in [*points][:1]:  # a final evaluation may have several
        at, values, low, high = np.array(points[metric], float).T
        axis.plot(at, values, "o-", color="C3", label=f"{metric}, test queries, 95 %")
        axis.vlines(at, low, high, color="C3")


def draw_timeline(spans: Spans) -> Figure:
    """Draw the share of each activity over the whole run, and over three steps of its middle.

    Those are shown for a second at least. The clock of the spans begins at 0.
    """
    steps = [start for name, start, _ in spans.get("trainer", []) if name == "step"]
    shown = steps[len(steps) // 2 :][:4] or [0.0]
    middle = shown[0], max(shown[-1], shown[0] + 1.0)
    whole = 0.0, max((end for rows in spans.values() for *_, end in rows), default=1.0)
    titles = {"the whole run": whole, f"{middle[1] - middle[0]:.0f} s from its middle": middle}
    figure = Figure(figsize=(9, 2.8 + 0.4 * len(spans)), dpi=120, layout="constrained")
    for part, (title, (begin, end)) in zip(figure.subfigures(1, 2), titles.items()):
        axis, edges = part.subplots(), np.linspace(begin, end, SHARES + 1)
        for row, rows in enumerate(spans.values()):
            base = np.full(SHARES, -row - 0.4)
            for activity, color in COLORS.items():
                times = [t for name, *ends in rows if name == activity for t in ends]
                # Seconds of it until each time: they grow within a span.
                spent = np.cumsum(np.diff([0.0, *times]) * (np.arange(len(times)) % 2))
                share = np.diff(np.interp(edges, [0.0, *times], [0.0, *spent])) / np.diff(edges)
                top, label = base + 0.8 * share, activity if row == 0 else None
                axis.fill_between(
                    edges[:-1], base, top, step="post", color=color, lw=0, label=label
                )
                base = top
        axis.set(title=f"{title}: share of each activity", xlabel="seconds", xlim=(begin, end))
        axis.set_yticks([-row for row in range(len(spans))], list(spans))
        part.legend(ncols=3, loc="outside lower center")
    return figure


def write_trace(path: Path, spans: Spans) -> None:
    """Write spans, whose clock begins at 0, as a Chrome trace: open it in ui.perfetto.dev."""
    events = []
    for pid, (process, rows) in enumerate(spans.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
        for name, start, end in rows:
            times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}  # microseconds
            events.append({"ph": "X", "pid": pid, "tid": 0, "name": name} | times)
    path.write_text(json.dumps({"traceEvents": events}))
