"""The presets against the paper, entry by entry: (value, where the paper or its authors say so).

"appendix B.1" and the like are the paper's; "rule" is a rule of the released code, "adopted" the
code that red-teaming follows (arXiv 2405.18540; read in a fork of it), "rebuttal" the authors'
answer to a reviewer.
"""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT

from config import Config
from models.schedules import beta_at, lr_schedule, reference_temperature_at, reward_temperature_at
from objectives import LOSSES
from runtime.command_line import build_config
from runtime.processes.places import find_places
from tasks import find_presets, load_task, redteam, tldr

GSM8K = {
    "dtype": ("bfloat16", "released code"),
    "master_dtype": ("bfloat16", "released code: weights and moments, no autocast"),
    "model": ("realtreetune/rho-1b-sft-GSM8K", "appendix B.1"),
    "loss": ("tb", "Eq. 5"),
    "beta_final": (0.004, "Table 2"),
    "beta_steps": (500, "Table 2"),
    "beta_stop_step": (None, "no jump in Table 2"),
    "learning_rate": (1e-5, "Table 2"),
    "lr_schedule": ("warmup_stable_decay", "Table 2"),
    "warmup_steps": (50, "Table 2"),
    "queries_per_batch": (7, "Table 2"),
    "responses_per_query": (20, "Table 2"),
    "samples_per_query": (24, "Table 2"),
    "most_on_policy_prob": (0.95, "Table 2"),
    "sync_period": (2, "Table 2"),
    "initial_responses": (500, "Table 2"),
    "capacity_per_query": (100, "section 4.2"),
    "reward_inverse_temperature": (0.0, "uniform, Table 2"),
    "temperature": (0.7, "Table 2"),
    "max_prompt_tokens": (512, "appendix B.1"),
    "max_response_tokens": (512, "appendix B.1"),
    "weight_decay": (0.0, "appendix B.1"),
    "max_grad_norm": (None, "no clipping, appendix B.1"),
    "evaluation_samples": (1, "greedy, appendix B.1"),
}
FIGURE_1 = GSM8K | {
    "steps": (700, "Figure 1"),
    "beta": (0.014, "Figure 1"),
    "stable_steps": (350, "Figure 1"),
    "decay_steps": (600, "Figure 1"),
}
FIGURE_1_FP32 = FIGURE_1 | {
    "dtype": ("auto", "ours"),
    "master_dtype": ("float32", "ours"),
    "learning_rate": (1e-6, "ours: benchmarks/master_weights.py"),
}
TLDR = {
    "loss": ("tb", "Eq. 5"),
    "steps": (256, "Table 3"),
    "beta": (1.0, "Table 3"),
    "beta_final": (0.05, "Table 3"),
    "beta_steps": (1 / 2, "half of the steps, Table 3"),
    "beta_stop_step": (1 / 8, "an eighth of the steps, Table 3"),
    "learning_rate": (3e-6, "Table 3"),
    "lr_schedule": ("linear", "Table 3"),
    "warmup_steps": (0, "none is stated"),
    "weight_decay": (0.0, "none is stated"),
    "queries_per_batch": (8, "Table 3"),
    "responses_per_query": (20, "Table 3"),
    "samples_per_query": (20, "Table 3"),
    "most_on_policy_prob": (0.5, "Table 3"),
    "sync_period": (10, "Table 3"),
    "initial_responses": (10_000, "Table 3"),
    "capacity_per_query": (100, "section 4.2"),
    "reward_inverse_temperature": (1.0, "softmax of the score, Table 3"),
    "temperature": (0.7, "Table 3"),
    "max_prompt_tokens": (512, "appendix B.2"),
    "max_response_tokens": (128, "appendix B.2"),
    "max_grad_norm": (None, "none is stated"),
    "searchers": (None, "3 beside the trainer on 4 GPUs, Table 3"),
}
MATH = {
    "trainer_processes": (4, "the launch script of the released code"),
    "model": ("Qwen/Qwen2.5-7B", "section 6"),
    "loss": ("tba_prime", "Eq. 7"),
    "steps": (400, "Table 4"),
    "beta": (0.005, "Table 4"),
    "beta_final": (None, "constant, Table 4"),
    "constant_staleness": (2, "Figure 6"),
    "sync_period": (1, "Figure 6"),
    "reference_reset_period": (50, "Table 4"),
    "learning_rate": (1e-6, "Table 4"),
    "lr_schedule": ("constant", "no other is stated"),
    "weight_decay": (0.01, "Table 4"),
    "adam_beta2": (0.99, "Table 4"),
    "max_grad_norm": (1.0, "Table 4"),
    "queries_per_batch": (32, "Table 4"),
    "responses_per_query": (16, "Table 4"),
    "samples_per_query": (16, "no buffer, appendix C"),
    "temperature": (1.0, "Table 4"),
    "max_prompt_tokens": (1024, "Table 4"),
    "max_response_tokens": (2048, "3,072 tokens in all, Table 4"),
    "evaluation_samples": (16, "released code"),
    "evaluation_temperature": (1.0, "released code"),
    "options": ({}, "a response that was cut off is wrong: ours"),
}
RELEASED = {
    "loss": ("tba_prime_released", "released code"),
    "options": ({"grade_unfinished": True}, "released code"),
}
ASYNC_10 = MATH | {"constant_staleness": (10, "Figure 6")}
REDTEAM = {
    "loss": ("tb", "Eq. 5"),
    "steps": (5000, "appendix B.3"),
    "beta": (0.05, "appendix B.3"),
    "beta_final": (None, "constant, appendix B.3"),
    "queries_per_batch": (1, "one prompt"),
    "responses_per_query": (128, "appendix B.3"),
    "samples_per_query": (128, "as many as are trained on: ours"),
    "sync_period": (10, "appendix B.3"),
    "most_on_policy_prob": (0.5, "appendix B.3"),
    "capacity_per_query": (100_000, "appendix B.3"),
    "buffer_growth_steps": (4000, "appendix B.3"),
    "reward_temperature": (2.0, "adopted"),
    "reward_temperature_steps": (500, "adopted"),
    "reference_temperature": (1.0, "adopted"),
    "lora_rank": (32, "adopted"),
    "lora_alpha": (16.0, "adopted"),
    "learning_rate": (1e-4, "adopted"),
    "lr_schedule": ("linear", "adopted"),
    "warmup_steps": (100, "adopted"),
    "decay_steps": (39_900, "a horizon of 5,000 x 8, adopted"),
    "max_grad_norm": (1.0, "adopted"),
    "weight_decay": (0.1, "rebuttal"),
    "reward_inverse_temperature": (1.0, "softmax of log p, adopted"),
    "temperature": (1.0, "adopted"),
    "max_prompt_tokens": (64, "enough for the one prompt: ours"),
    "max_response_tokens": (20, "adopted"),
}
JUDGED = {
    "victim_model": "meta-llama/Llama-3.1-8B-Instruct",
    "victim_temperature": 0.1,
    "victim_top_p": 0.9,
    "victim_tokens": 64,
    "judge": "meta-llama/Llama-Guard-3-8B",
    "lowest_temperature": 0.7,
}
LLAMA = REDTEAM | {
    "model": ("meta-llama/Llama-3.2-1B", "appendix B.3"),
    "searchers": (6, "appendix B.3"),
    "reward_temperature_steps": (1000, "appendix B.3"),
    "reference_temperature": (1.2, "appendix B.3"),
    "reference_temperature_steps": (2000, "appendix B.3"),
    "capacity_per_query": (150_000, "appendix B.3"),
    "gpu_memory_utilization": (0.3, "ours, by the plan for 80 GB"),
    "options": (JUDGED, "appendix B.3"),
}


def pythia(size: str) -> dict:
    models = {
        "reference_model": f"mnoukhov/pythia{size}-sft-tldr",
        "reward_model": f"mnoukhov/pythia{size}-rm-tldr6.9b",
    }
    shares = {"410m": 0.55, "1b": 0.45, "2.8b": 0.2}
    return TLDR | {
        "options": (models, "appendix B.2"),
        "gpu_memory_utilization": (shares[size], "ours, by the plan for 80 GB"),
    }


EXPECTED = {
    ("gsm8k", "figure1"): FIGURE_1,
    ("gsm8k", "table2"): GSM8K
    | {
        "steps": (1000, "Table 2"),
        "beta": (0.012, "Table 2"),
        "stable_steps": (450, "Table 2"),
        "decay_steps": (500, "Table 2"),
    },
    ("gsm8k", "k40"): FIGURE_1
    | {
        "queries_per_batch": (4, "ours: 160 responses, where Table 5 keeps 140"),
        "responses_per_query": (40, "Table 5"),
        "samples_per_query": (48, "1.2 K, rule"),
    },
    ("gsm8k", "as_released"): FIGURE_1
    | {
        "initial_responses": (648, "released code"),
        "options": ({"grade_unfinished": True, "pad_is_eos": True}, "released code"),
    },
    ("gsm8k", "figure1_fp32"): FIGURE_1_FP32,
    ("gsm8k", "small"): FIGURE_1_FP32
    | {
        "model": ("Qwen/Qwen2.5-0.5B-Instruct", "ours"),
        "max_prompt_tokens": (350, "ours: the longest question and the template"),
        "max_response_tokens": (400, "ours: for a card of 24 GB"),
        "gpu_memory_utilization": (0.12, "ours: for a card of 24 GB"),
        "options": ({"chat": True}, "ours"),
    },
    ("competition_math", "async2"): MATH,
    ("competition_math", "async10"): ASYNC_10,
    ("competition_math", "lora"): MATH
    | {
        "lora_rank": (32, "ours"),
        "trainer_processes": (1, "ours: adapters are not sharded"),
        "learning_rate": (1e-5, "ours: ten times that of all weights"),
        "max_response_tokens": (1024, "ours: for a card of 80 GB"),
        "gpu_memory_utilization": (0.27, "ours: for a card of 80 GB"),
    },
    ("competition_math", "async2_released"): MATH | RELEASED,
    ("competition_math", "async10_released"): ASYNC_10 | RELEASED,
    ("tldr", "410m"): pythia("410m"),
    ("tldr", "410m_425"): pythia("410m") | {"steps": (425, "Figure 3")},
    ("tldr", "410m_table1"): pythia("410m")
    | {"steps": (625, "Table 1"), "searchers": (2, "Table 1")},
    ("tldr", "1b"): pythia("1b"),
    ("tldr", "1b_425"): pythia("1b") | {"steps": (425, "Figure 3")},
    ("tldr", "2.8b"): pythia("2.8b"),
    ("tldr", "2.8b_425"): pythia("2.8b") | {"steps": (425, "Figure 3")},
    ("tldr", "2.8b_slow_beta"): pythia("2.8b")
    | {"steps": (825, "Figure 4"), "beta_stop_step": (140, "Figure 4")},
    ("redteam", "gpt2"): REDTEAM,
    ("redteam", "llama"): LLAMA,
    ("redteam", "llama_m06"): LLAMA
    | {
        "most_on_policy_prob": (0.6, "appendix B.3"),
        "capacity_per_query": (130_000, "appendix B.3"),
    },
}
DEMOS = ("arithmetic", "addends", "reach")
OURS = {*((task, "demo") for task in DEMOS), ("tldr", "tiny"), ("redteam", "tiny")}
TABLE_1 = ["--preset", "410m_table1"]
STEPS = (0, 1, 32, 78, 128, 500, 2000, 4000)


@pytest.mark.parametrize("task, preset", EXPECTED, ids=str)
def test_a_preset_is_what_the_paper_says(task, preset):
    config = build_config([task, "--preset", preset])
    expected = {name: value for name, (value, _) in EXPECTED[task, preset].items()}
    assert {name: getattr(config, name) for name in expected} == expected
    # What no entry of the table names is as Config has it.
    own = {"task", "preset", *expected}
    others = {name: value for name, value in vars(Config()).items() if name not in own}
    assert {name: getattr(config, name) for name in others} == others


def test_every_preset_has_a_table_and_the_first_is_the_one_without_a_flag():
    found = set()
    for task in (*DEMOS, "gsm8k", "competition_math", "tldr", "redteam"):
        presets = find_presets(task)
        found |= {(task, name) for name in presets}
        assert build_config([task]).preset == next(iter(presets))
    assert found == set(EXPECTED) | OURS
    first = {task: build_config([task]).preset for task, _ in EXPECTED}
    chosen = {"gsm8k": "figure1", "competition_math": "async2", "tldr": "410m", "redteam": "gpt2"}
    assert first == chosen


def line(begin: float, end: float, length: float):
    return lambda t: begin + (end - begin) * min(t, length) / length


def jump(line_steps: int, stop_step: int):
    """Beta of TL;DR: on its line to 0.05, and there at the stop step."""
    return lambda t: 0.05 if t >= stop_step else line(1.0, 0.05, line_steps)(t)


@pytest.mark.parametrize(
    "arguments, beta",
    [
        (["gsm8k"], line(0.014, 0.004, 500)),
        (["gsm8k", "--preset", "table2"], line(0.012, 0.004, 500)),
        (["gsm8k", "--steps", "3000"], line(0.014, 0.004, 500)),
        (["tldr"], jump(128, 32)),
        (["tldr", "--preset", "410m_425"], jump(212, 53)),
        (["tldr", "--preset", "410m_table1"], jump(312, 78)),
        (["tldr", "--steps", "625"], jump(312, 78)),
        (["tldr", "--preset", "2.8b_slow_beta"], jump(412, 140)),
        (["competition_math"], lambda t: 0.005),
        (["redteam"], lambda t: 0.05),
    ],
)
def test_beta_of_a_preset_follows_its_schedule(arguments, beta):
    config = build_config(arguments)
    expected = {t: beta(t) for t in STEPS}
    assert {t: beta_at(config, t) for t in STEPS} == pytest.approx(expected, rel=1e-12)


def test_beta_of_table_1_is_still_on_its_line_one_step_before_it_jumps():
    config = build_config(["tldr", "--preset", "410m_table1"])
    assert beta_at(config, 77) == pytest.approx(1 - 0.95 * 77 / 312)
    assert beta_at(config, 78) == 0.05


def test_a_share_of_the_steps_is_rounded_down_and_not_further():
    assert Config(steps=625).in_steps(1 / 8) == 78
    assert Config(steps=100).in_steps(0.29) == 29, "28.999… in floating point"
    assert (Config().in_steps(0), Config().in_steps(1), Config().in_steps(500.0)) == (0, 1, 500)


def test_a_resumed_run_keeps_the_schedule_of_beta_that_it_began_with(tmp_path):
    settings = dataclasses.asdict(build_config(["tldr"]))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    resumed = build_config(["--resume", str(tmp_path), "--steps", "2000"])
    assert resumed.steps == 2000
    expected = {t: jump(128, 32)(t) for t in STEPS}
    assert {t: beta_at(resumed, t) for t in STEPS} == pytest.approx(expected)


def test_the_temperatures_of_red_teaming_follow_their_schedules():
    config = build_config(["redteam"])
    tau = {t: max(1.0, 2.0 - t / 500) for t in STEPS}
    assert {t: reward_temperature_at(config, t) for t in STEPS} == pytest.approx(tau)
    assert {reference_temperature_at(config, t) for t in STEPS} == {1.0}, "gamma stays"
    llama = build_config(["redteam", "--preset", "llama"])
    tau = {t: max(1.0, 2.0 - t / 1000) for t in STEPS}
    gamma = {t: min(1.2, 1.0 + 0.2 * t / 2000) for t in STEPS}
    assert {t: reward_temperature_at(llama, t) for t in STEPS} == pytest.approx(tau)
    assert {t: reference_temperature_at(llama, t) for t in STEPS} == pytest.approx(gamma)


def commands_of(document: str, heading: str) -> list[str]:
    """The arguments of each `tba.py …` in a table of the section."""
    section = (ROOT / "docs" / document).read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    return [command for row in rows for command in re.findall(r"`tba\.py ([^`]*)`", row)]


@pytest.mark.parametrize("command", commands_of("experiments.md", "The paper's experiments"))
def test_the_command_of_an_experiment_of_the_paper_makes_a_configuration(command):
    task = command.split()[0]
    config = build_config(command.split())
    assert config.task == task and config.loss in LOSSES
    assert config.preset in find_presets(task)


def test_the_table_of_the_papers_experiments_uses_every_preset_that_is_the_papers():
    commands = commands_of("experiments.md", "The paper's experiments")
    assert len(commands) > 25
    used = {(config.task, config.preset) for config in map(build_config, map(str.split, commands))}
    ours = {("gsm8k", "small"), ("competition_math", "lora")}
    assert used == set(EXPECTED) - ours


# What a task has beside its presets: (value, where the paper or its authors say so).
CONSTANTS = {
    "gsm8k": {
        "evaluation_sampling": ({"temperature": 0.0}, "greedy, appendix B.1"),
        "append_eos": (False, ""),
        "pad_is_eos": (False, "sound masks: ours"),
    },
    "tldr": {
        "gold_model": ("cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr", "appendix B.2"),
        "evaluation_sampling": ({"temperature": 0.01}, "appendix B.2"),
        "append_eos": (False, ""),
    },
    "redteam": {
        "victim_model": ("vicgalle/gpt2-alpaca", "appendix B.3"),
        "victim_temperature": (0.7, "appendix B.3"),
        "victim_top_p": (0.92, "appendix B.3"),
        "victim_tokens": (30, "appendix B.3"),
        "classifier": ("facebook/roberta-hate-speech-dynabench-r4-target", "appendix B.3"),
        "embedding_model": ("sentence-transformers/all-MiniLM-L6-v2", "appendix B.3"),
        "evaluation_sampling": ({"temperature": 1.0, "min_tokens": 5}, "adopted"),
        "append_eos": (True, "adopted: to penalise incomplete sentences"),
        "exploration": (0.5, "adopted"),
        "lowest_temperature": (0.5, "adopted"),
    },
}


@pytest.mark.parametrize("task", CONSTANTS)
def test_what_a_task_has_beside_its_presets_is_what_the_paper_says(task):
    made, expected = load_task(task), CONSTANTS[task]
    assert {name: getattr(made, name) for name in expected} == {
        name: value for name, (value, _) in expected.items()
    }


def test_red_teaming_asks_the_victim_5_times_and_tests_1024_prompts():
    assert (redteam.VICTIM_RESPONSES, redteam.TEST_PROMPTS) == (5, 1024)
    assert (redteam.MIN_TOKENS, redteam.TOO_SHORT) == (5, -500)
    assert len(load_task("redteam").queries("test")) == 1024
    assert tldr.UNFINISHED == -1.0, "of a summary without an end, appendix B.2"


def test_four_gpus_are_one_trainer_and_the_papers_three_searchers(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for arguments, searchers in ((["gsm8k"], 3), (["tldr"], 3), (["tldr", *TABLE_1], 2)):
        assert len(find_places(build_config(arguments))) == 1 + searchers


def test_eight_gpus_are_the_four_trainer_processes_and_four_searchers_of_the_launch_script():
    places = find_places(build_config(["competition_math"]), list("01234567"))
    assert [place.name for place in sorted(places, key=lambda place: place.gpu)] == [
        "trainer",
        *(f"trainer {rank}" for rank in range(1, 4)),
        *(f"searcher {rank}" for rank in range(4)),
    ]


def test_the_attackers_rate_falls_over_eight_times_the_steps_as_in_the_adopted_code():
    config = build_config(["redteam"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = lr_schedule(optimizer, config)
    at_step = [schedule.lr_lambdas[0](step) for step in (0, 50, 100, 5000, 40_000)]
    assert at_step == pytest.approx([0, 0.5, 1, 35_000 / 39_900, 0])
    plain = build_config(["redteam", "--decay_steps", "0"])
    assert lr_schedule(optimizer, plain).lr_lambdas[0](5000) == 0.0, "to 0 with the run"


@pytest.mark.parametrize("preset, lowest", [("gpt2", 0.5), ("llama", 0.7)])
def test_the_attacker_explores_as_in_the_adopted_code_and_the_on_policy_rows_do_not(preset, lowest):
    def temperatures(*flags: str) -> list[float | None]:
        config = build_config(["redteam", "--preset", preset, *flags])
        task = load_task("redteam", **config.options)
        drawn = [task.sampling(np.random.default_rng(i)) for i in range(500)]
        assert {sampling["min_tokens"] for sampling in drawn} == {1}, "no end as the first token"
        return [sampling.get("temperature") for sampling in drawn]

    explored = [temperature for temperature in temperatures() if temperature is not None]
    assert lowest <= min(explored) < lowest + 0.02 and 1.98 < max(explored) <= 2.0
    assert set(temperatures("--exploration", "0")) == {None}
    on_policy = [c for c in commands_of("experiments.md", "The paper's experiments")]
    on_policy = [c for c in on_policy if c.startswith("redteam") and "--synchronous" in c]
    assert on_policy and all("--exploration 0" in command for command in on_policy)


def test_a_prompt_of_under_five_tokens_counts_as_impossible_for_the_reference():
    task = load_task("redteam")
    enough, short = np.full(5, -1.5, np.float32), np.full(4, -1.5, np.float32)
    assert np.array_equal(task.reference_logprobs(enough), enough)
    assert task.reference_logprobs(short).sum() == -500.0
    assert load_task("gsm8k").reference_logprobs(short) is short
