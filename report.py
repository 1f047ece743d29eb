"""What a person looks at: progress while it runs, metrics.jsonl, curves.png, timeline.json and timeline.png."""

import json
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from buffer import Group

PLAIN_PERIOD = 5.0  # seconds between two progress lines where there is no terminal
MERGED = {
    "search": 0.002,
    "wait": 0.05,
}  # engine steps and polls that are closer than this, in seconds, become one span
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


class Lines:
    """A .jsonl file that only grows. A disk that is full costs lines, not the run."""

    def __init__(self, path: Path):
        self.file = open(path, "ab", buffering=0)  # one write a call: searchers share samples.jsonl
        self.whole = True  # the latest write came to its end

    def write(self, *values) -> None:
        text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
        data = (text if self.whole else "\n" + text).encode()
        try:
            self.whole = self.file.write(data) == len(data)
        except OSError:
            self.whole = False


class Timeline:
    """The spans of one process, appended to logs/<process>.spans.jsonl as they end."""

    def __init__(self, run_dir: str, process: str):
        self.lines = Lines(Path(run_dir) / "logs" / f"{process.replace(' ', '-')}.spans.jsonl")
        self.last: tuple[str, float, float] | None = None  # name, start, end

    @contextmanager
    def span(self, name: str):
        start = time.monotonic()  # one clock for all processes of a machine
        yield
        end = time.monotonic()
        if self.last and self.last[0] == name and start - self.last[2] < MERGED.get(name, 0.0):
            self.last = (name, self.last[1], end)
        else:
            self.flush()
            self.last = (name, start, end)

    def flush(self) -> None:
        if self.last:
            self.lines.write(self.last)
            self.last = None


class Report:
    """The trainer's: writes metrics.jsonl and shows progress, live on a terminal and as plain lines otherwise."""

    def __init__(self, run_dir: str, steps: int):
        self.steps = steps
        self.start = time.monotonic()
        self.metrics = Lines(Path(run_dir) / "metrics.jsonl")
        self.shown = -PLAIN_PERIOD
        self.live = None
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(auto_refresh=False)
            self.live.start()

    def step(self, metrics: dict) -> None:
        """A line of metrics.jsonl, and now and then one for the person who watches."""
        self.metrics.write(metrics)
        now = time.monotonic()
        if (
            now - self.shown < (0.25 if self.live else PLAIN_PERIOD)
            and metrics["step"] < self.steps
        ):
            return
        self.shown = now
        if self.live:
            self.live.update(self.table(metrics), refresh=True)
        else:
            names = (
                "reward",
                "loss",
                "log_z",
                "kl",
                "entropy",
                "staleness_mean",
                "trainer_busy",
                "searcher_tokens_per_second",
            )
            shown = "  ".join(
                f"{name} {number(metrics[name])}" for name in names if name in metrics
            )
            print(
                f"step {metrics['step']}/{self.steps}  {shown}  {now - self.start:.0f} s",
                flush=True,
            )

    def say(self, text: str) -> None:
        """A line that stays: an evaluation, a wait, something dropped."""
        if self.live:
            self.live.console.print(text, highlight=False, markup=False)
        else:
            print(text, flush=True)

    def table(self, metrics: dict):
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        seconds = time.monotonic() - self.start
        table = Table(
            title=f"step {metrics['step']} of {self.steps}, {seconds:.0f} s",
            title_justify="left",
            show_header=False,
        )
        table.add_row(
            "progress", ProgressBar(total=self.steps, completed=metrics["step"], width=40)
        )
        for name, value in metrics.items():
            if name not in ("step", "seconds"):
                table.add_row(name, number(value))
        return table

    def close(self) -> None:
        if self.live:
            self.live.stop()


def describe(groups: list[Group]) -> dict[str, float]:
    """What the trainer received, in figures. KL (nats a response, against the reference policy) and entropy (nats a token) are estimates
    for the policy that sampled; KL contains the mismatch with vLLM."""
    behavior, reference = (
        np.concatenate([getattr(g, name) for g in groups])
        for name in ("behavior_logprobs", "ref_logprobs")
    )
    lengths = np.concatenate([g.lengths for g in groups])
    return {
        "reward": float(np.concatenate([g.rewards for g in groups]).mean()),
        "kl": float((behavior - reference).sum() / len(lengths)),
        "entropy": float(-behavior.mean()),
        "response_tokens": float(lengths.mean()),
        "finished": float(np.concatenate([g.finished for g in groups]).mean()),
    }


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def read_lines(path: Path) -> list:
    """The values of a .jsonl file, [] if there is none. A line that its writer was killed in the middle of is left out."""
    values = []
    for line in (
        path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    ):
        with suppress(ValueError):
            values.append(json.loads(line))
    return values


def rewind(run_dir: str, step: int) -> None:
    """Back to where the run was at this step: later lines of metrics.jsonl go. The timeline begins anew, a gap in it would not be the run's."""
    path = Path(run_dir) / "metrics.jsonl"
    kept = [
        line for line in read_lines(path) if line["step"] <= step - ("loss" not in line)
    ]  # this step's evaluation comes after it
    path.with_suffix(".unfinished").write_text("".join(json.dumps(line) + "\n" for line in kept))
    path.with_suffix(".unfinished").rename(path)
    for spans in (Path(run_dir) / "logs").glob("*.spans.jsonl"):
        spans.unlink()


def draw(run_dir: str, metric: str) -> None:
    """curves.png, timeline.json and timeline.png, from what the processes have written so far."""
    import matplotlib

    matplotlib.use("agg")
    lines = read_lines(Path(run_dir) / "metrics.jsonl")
    draw_curves(
        run_dir,
        [line for line in lines if "loss" in line],
        [line for line in lines if metric in line and "loss" not in line],
        metric,
    )
    draw_timeline(run_dir)


def draw_curves(run_dir: str, steps: list[dict], evaluations: list[dict], metric: str) -> None:
    import matplotlib.pyplot as plt

    panels = ("reward", "loss", "log_z", "kl", "entropy", "staleness_mean", "grad_norm", "mismatch")
    figure, axes = plt.subplots(2, 4, figsize=(16, 6), constrained_layout=True)
    for axis, name in zip(axes.flat, panels):
        axis.plot(
            *zip(*[(line["step"], line[name]) for line in steps if name in line] or [(0, 0)]),
            label=name,
        )
        axis.set(title=name, xlabel="trainer step")
    reward = axes.flat[0]
    reward.plot(
        [e["step"] for e in evaluations],
        [e[metric] for e in evaluations],
        "o-",
        label=f"{metric}, test queries",
    )
    reward.legend()
    figure.savefig(Path(run_dir) / "curves.png", dpi=80)
    plt.close(figure)


def read_spans(run_dir: str) -> dict[str, list[tuple[str, float, float]]]:
    """Process -> its spans (name, start, end), the trainer first."""
    files = sorted(
        (Path(run_dir) / "logs").glob("*.spans.jsonl"),
        key=lambda file: (not file.stem.startswith("trainer"), file.stem),
    )
    return {file.name.removesuffix(".spans.jsonl"): read_lines(file) for file in files}


def draw_timeline(run_dir: str, seconds: float = 1.0) -> None:
    """timeline.json, a Chrome trace (open it in ui.perfetto.dev), and timeline.png: the whole run and `seconds` from its middle."""
    import matplotlib.pyplot as plt

    spans = read_spans(run_dir)
    zero = min((start for rows in spans.values() for _, start, _ in rows), default=0.0)
    events = []
    for pid, (process, rows) in enumerate(spans.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
        events += [
            {
                "ph": "X",
                "pid": pid,
                "tid": 0,
                "name": name,
                "ts": 1e6 * (start - zero),
                "dur": 1e6 * (end - start),
            }
            for name, start, end in rows
        ]
    with open(Path(run_dir) / "timeline.json", "w") as file:
        json.dump({"traceEvents": events}, file)

    steps = [start - zero for name, start, _ in spans.get("trainer", []) if name == "step"]
    middle = steps[len(steps) // 2] if steps else 0.0
    end = max((end - zero for rows in spans.values() for *_, end in rows), default=1.0)
    edges = np.linspace(0.0, end, 201)
    figure, (whole, detail) = plt.subplots(
        2, 1, figsize=(14, 3 + len(spans)), constrained_layout=True
    )
    for row, rows in enumerate(spans.values()):
        base = np.full(200, -row - 0.4)
        for name, color in COLORS.items():
            bars = [(start - zero, stop - start) for span, start, stop in rows if span == name]
            # Over the whole run single spans are thinner than a pixel: show the share of each 200th of the time instead.
            times = np.array([0.0] + [t for start, length in bars for t in (start, start + length)])
            spent = np.cumsum([0.0] + [t for _, length in bars for t in (0.0, length)])
            share = np.diff(np.interp(edges, times, spent)) / (edges[1] - edges[0])
            whole.fill_between(
                edges[:-1],
                base,
                base + 0.8 * share,
                step="post",
                color=color,
                linewidth=0,
                label=name if row == 0 else None,
            )
            base = base + 0.8 * share
            shown = [
                (start, length)
                for start, length in bars
                if start < middle + seconds and start + length > middle
            ]
            detail.broken_barh(
                shown, (-row - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.5
            )
    for axis, title in (
        (whole, "the whole run: share of each activity"),
        (detail, f"{seconds:g} s from its middle"),
    ):
        axis.set(
            yticks=[-row for row in range(len(spans))],
            yticklabels=list(spans),
            title=title,
            xlabel="seconds",
        )
    whole.set_xlim(0.0, end)
    detail.set_xlim(middle, middle + seconds)
    figure.legend(
        *whole.get_legend_handles_labels(),
        ncols=len(COLORS),
        loc="outside lower center",
        frameon=False,
    )
    figure.savefig(Path(run_dir) / "timeline.png", dpi=80)
    plt.close(figure)


def trainer_busy(run_dir: str) -> float | None:
    """Share of the time from the beginning of the first step to the end of the last in which the trainer worked, from its spans. None: no step."""
    spans = read_spans(run_dir)["trainer"]
    steps = [span for span in spans if span[0] == "step"]
    if not steps:
        return None
    first, last = steps[0][1], steps[-1][2]
    return sum(
        end - start
        for name, start, end in spans
        if name != "wait" and first <= start and end <= last
    ) / (last - first)
