"""The pictures: what is drawn, read off the figures themselves."""

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from launch.display import pictures


@pytest.fixture
def panels(tmp_path):
    """A function that draws the curves of these lines of metrics.jsonl: title -> panel."""

    def draw(lines: list[dict]) -> dict:
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        figure = pictures.draw_curves(str(tmp_path))
        figure.canvas.draw()
        return {axis.get_title(): axis for axis in figure.axes}

    return draw


def test_evaluations_are_drawn_over_the_reward_with_their_intervals(panels):
    lines = [{"step": step, "loss": 1.0, "reward": 0.5} for step in range(1, 4)]
    lines.insert(1, {"step": 1, "accuracy": 0.25, "accuracy_interval": [0.125, 0.5]})
    lines.append({"step": 3, "final_accuracy": 0.75, "final_accuracy_interval": [0.625, 1.0]})
    axis = panels(lines)["reward of new responses"]
    (bars,) = axis.collections
    first, last = [[1, 0.125], [1, 0.5]], [[3, 0.625], [3, 1.0]]
    assert np.array(bars.get_segments()).tolist() == [first, last]
    assert axis.lines[-1].get_xydata().tolist() == [[1, 0.25], [3, 0.75]]


def test_no_factor_of_the_axis_stands_over_the_title_of_a_panel(panels):
    drawn = panels([{"step": i, "loss": 1.0, "mismatch": i * 1e-7} for i in (1, 2)])
    axis = drawn["mismatch with vLLM, nats a token"].yaxis
    assert axis.get_offset_text().get_text() == "" and axis.get_ticklabels()[1].get_text() != "0"


def test_a_line_is_a_mean_over_a_fiftieth_of_the_run_with_the_raw_one_behind(panels):
    loss = np.random.default_rng(0).normal(size=500)
    drawn = panels([{"step": step, "loss": value} for step, value in enumerate(loss)])
    raw, smooth = drawn["loss"].lines
    assert raw.get_ydata() == pytest.approx(loss) and raw.get_alpha() < 1
    assert smooth.get_ydata() == pytest.approx(np.convolve(loss, np.full(10, 0.1), "valid"))
    assert smooth.get_xdata()[0] == 4.5, "in the middle of what it is the mean of"


def test_a_run_without_a_step_has_a_picture_of_each_panel_and_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parts = pictures.draw(str(tmp_path))
    assert parts.keys() == pictures.PANELS.keys()
    whole = imread(Path(tmp_path, "curves.png"))
    sizes = {imread(io.BytesIO(parts[title])).shape for title in pictures.PANELS}
    assert sizes == {(whole.shape[0] // 2, whole.shape[1] // 5, 4)}, "two rows of five"
