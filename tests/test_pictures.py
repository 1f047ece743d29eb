"""curves.png: what is drawn, read off the figure itself."""

import json

import matplotlib.pyplot as plt
import numpy as np
import pytest

from launch.display import pictures


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """Draw the curves of these lines of metrics.jsonl; return the panels by their titles."""
    monkeypatch.setattr(plt, "close", lambda figure: None)
    monkeypatch.setattr(pictures, "draw_timeline", lambda run_dir: None)

    def draw(lines: list[dict]) -> dict:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        pictures.draw(str(tmp_path))
        return {axis.get_title(): axis for axis in plt.gcf().axes}

    yield draw
    monkeypatch.undo()
    plt.close("all")


def test_evaluations_are_drawn_over_the_reward_with_their_intervals(drawn):
    lines = [{"step": step, "loss": 1.0, "reward": 0.5} for step in range(1, 4)]
    lines.insert(1, {"step": 1, "accuracy": 0.25, "accuracy_interval": [0.125, 0.5]})
    lines.append({"step": 3, "final_accuracy": 0.75, "final_accuracy_interval": [0.625, 1.0]})
    axis = drawn(lines)["reward of new responses"]
    (bars,) = axis.collections
    first, last = [[1, 0.125], [1, 0.5]], [[3, 0.625], [3, 1.0]]
    assert np.array(bars.get_segments()).tolist() == [first, last]
    assert axis.lines[-1].get_xydata().tolist() == [[1, 0.25], [3, 0.75]]


def test_a_run_without_an_evaluation_has_curves_and_panels_name_their_units(drawn):
    panels = drawn([{"step": 1, "loss": 1.0, "reward": 0.5}])
    assert not panels["reward of new responses"].collections
    assert {"KL to the reference, nats a response", "staleness, steps"} <= set(panels)


def test_a_line_is_a_mean_over_a_fiftieth_of_the_run_with_the_raw_one_behind(drawn):
    loss = np.random.default_rng(0).normal(size=500)
    panels = drawn([{"step": step, "loss": value} for step, value in enumerate(loss)])
    raw, smooth = panels["loss"].lines
    assert raw.get_ydata() == pytest.approx(loss) and raw.get_alpha() < 1
    assert smooth.get_ydata() == pytest.approx(np.convolve(loss, np.full(10, 0.1), "valid"))
    assert smooth.get_xdata()[0] == 4.5, "in the middle of what it is the mean of"
