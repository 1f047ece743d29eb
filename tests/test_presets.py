"""The presets against the paper, value by value, each beside where the paper or its authors say so.

"appendix B.1" and the like are the paper's; "rule" is a rule of the released code, "adopted" the
code that red-teaming follows (arXiv 2405.18540; read in a fork of it), "rebuttal" the authors'
answer to a reviewer.
"""

import dataclasses
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, flags

from config import Config
from models.schedules import beta_at, lr_schedule, reference_temperature_at, reward_temperature_at
from objectives import LOSSES
from runtime.command_line import build_config
from runtime.processes.places import find_places
from tasks import find_presets, load_task, redteam, tldr


def says(source: str, **values) -> dict:
    """What a source says of settings: name -> (value, source)."""
    return {name: (value, source) for name, value in values.items()}


def only(sayings: dict) -> dict:
    """The values without their sources."""
    return {name: value for name, (value, _) in sayings.items()}


GSM8K = {
    **says("Eq. 5", loss="tb"),
    **says("released code: no autocast", dtype="bfloat16", master_dtype="bfloat16"),
    **says("appendix B.1", model="realtreetune/rho-1b-sft-GSM8K", weight_decay=0.0),
    **says("appendix B.1", max_prompt_tokens=512, max_response_tokens=512),
    **says("appendix B.1: no clipping, greedy", max_grad_norm=None, evaluation_samples=1),
    **says("Table 2", beta_final=0.004, beta_steps=500),
    **says("no jump in Table 2", beta_stop_step=None),
    **says("Table 2", learning_rate=1e-5, lr_schedule="warmup_stable_decay", warmup_steps=50),
    **says("Table 2", queries_per_batch=7, responses_per_query=20, samples_per_query=24),
    **says("Table 2", most_on_policy_prob=0.95, sync_period=2, initial_responses=500),
    **says("Table 2: uniform replay", temperature=0.7, reward_inverse_temperature=0.0),
    **says("section 4.2", capacity_per_query=100),
}
FIGURE_1 = GSM8K | says("Figure 1", steps=700, beta=0.014, stable_steps=350, decay_steps=600)
FIGURE_1_FP32 = {
    **FIGURE_1,
    **says("ours", dtype="auto", master_dtype="float32"),
    **says("ours: benchmarks/master_weights.py", learning_rate=1e-6),
}
TLDR = {
    **says("Eq. 5", loss="tb"),
    **says("Table 3", steps=256, beta=1.0, beta_final=0.05),
    **says("Table 3: at a half and an eighth of the steps", beta_steps=1 / 2, beta_stop_step=1 / 8),
    **says("Table 3", learning_rate=3e-6, lr_schedule="linear"),
    **says("none is stated", warmup_steps=0, weight_decay=0.0, max_grad_norm=None),
    **says("Table 3", queries_per_batch=8, responses_per_query=20, samples_per_query=20),
    **says("Table 3", most_on_policy_prob=0.5, sync_period=10, initial_responses=10_000),
    **says("Table 3: softmax of the score", temperature=0.7, reward_inverse_temperature=1.0),
    **says("section 4.2", capacity_per_query=100),
    **says("appendix B.2", max_prompt_tokens=512, max_response_tokens=128),
    **says("3 beside the trainer on 4 GPUs, Table 3", searchers=None),
}
MATH = {
    **says("the launch script of the released code", trainer_processes=4),
    **says("section 6", model="Qwen/Qwen2.5-7B"),
    **says("Eq. 7", loss="tba_prime"),
    **says("Table 4", steps=400, beta=0.005, reference_reset_period=50),
    **says("constant, Table 4", beta_final=None),
    **says("Figure 6", constant_staleness=2, sync_period=1),
    **says("Table 4", learning_rate=1e-6, weight_decay=0.01, adam_beta2=0.99, max_grad_norm=1.0),
    **says("no other is stated", lr_schedule="constant"),
    **says("Table 4", queries_per_batch=32, responses_per_query=16, temperature=1.0),
    **says("no buffer, appendix C", samples_per_query=16),
    **says("Table 4: 3,072 tokens in all", max_prompt_tokens=1024, max_response_tokens=2048),
    **says("released code", evaluation_samples=16, evaluation_temperature=1.0),
    **says("a response that was cut off is wrong: ours", options={}),
}
RELEASED = says("released code", loss="tba_prime_released", options={"grade_unfinished": True})
ASYNC_10 = MATH | says("Figure 6", constant_staleness=10)
REDTEAM = {
    **says("Eq. 5", loss="tb"),
    **says("appendix B.3", steps=5000, beta=0.05, responses_per_query=128, sync_period=10),
    **says("constant, appendix B.3", beta_final=None),
    **says("one prompt", queries_per_batch=1),
    **says("as many as are trained on: ours", samples_per_query=128),
    **says("appendix B.3", capacity_per_query=100_000, buffer_growth_steps=4000),
    **says("appendix B.3", most_on_policy_prob=0.5),
    **says("adopted", reward_temperature=2.0, reward_temperature_steps=500),
    **says("adopted", reference_temperature=1.0, temperature=1.0, max_response_tokens=20),
    **says("adopted", lora_rank=32, lora_alpha=16.0, max_grad_norm=1.0),
    **says("adopted", learning_rate=1e-4, lr_schedule="linear", warmup_steps=100),
    **says("a horizon of 5,000 x 8, adopted", decay_steps=39_900),
    **says("rebuttal", weight_decay=0.1),
    **says("softmax of log p, adopted", reward_inverse_temperature=1.0),
    **says("enough for the one prompt: ours", max_prompt_tokens=64),
}
VICTIM = dict(victim_temperature=0.1, victim_top_p=0.9, victim_tokens=64)
JUDGED = dict(victim_model="meta-llama/Llama-3.1-8B-Instruct", judge="meta-llama/Llama-Guard-3-8B")
LLAMA = {
    **REDTEAM,
    **says("appendix B.3", model="meta-llama/Llama-3.2-1B", searchers=6),
    **says("appendix B.3", reward_temperature_steps=1000, capacity_per_query=150_000),
    **says("appendix B.3", reference_temperature=1.2, reference_temperature_steps=2000),
    **says("appendix B.3", options=VICTIM | JUDGED | {"lowest_temperature": 0.7}),
    **says("ours, by the plan for 80 GB", gpu_memory_utilization=0.3),
}


def pythia(size: str, share: float) -> dict:
    sft, reward = f"mnoukhov/pythia{size}-sft-tldr", f"mnoukhov/pythia{size}-rm-tldr6.9b"
    models = says("appendix B.2", options=dict(reference_model=sft, reward_model=reward))
    return TLDR | models | says("ours, by the plan for 80 GB", gpu_memory_utilization=share)


PYTHIA = {
    size: pythia(size, share) for size, share in (("410m", 0.55), ("1b", 0.45), ("2.8b", 0.2))
}
EXPECTED = {
    ("gsm8k", "figure1"): FIGURE_1,
    ("gsm8k", "table2"): GSM8K
    | says("Table 2", steps=1000, beta=0.012, stable_steps=450, decay_steps=500),
    ("gsm8k", "k40"): FIGURE_1
    | says("ours: 160 responses, where Table 5 keeps 140", queries_per_batch=4)
    | says("Table 5; S by the rule, 1.2 K", responses_per_query=40, samples_per_query=48),
    ("gsm8k", "as_released"): FIGURE_1
    | says("released code", initial_responses=648)
    | says("released code", options={"grade_unfinished": True, "pad_is_eos": True}),
    ("gsm8k", "figure1_fp32"): FIGURE_1_FP32,
    ("gsm8k", "small"): FIGURE_1_FP32
    | says("ours", model="Qwen/Qwen2.5-0.5B-Instruct", options={"chat": True})
    | says("ours: the longest question and the template", max_prompt_tokens=350)
    | says("ours: for 24 GB", max_response_tokens=400, gpu_memory_utilization=0.12),
    ("competition_math", "async2"): MATH,
    ("competition_math", "async10"): ASYNC_10,
    ("competition_math", "lora"): MATH
    | says("ours: adapters are not sharded", lora_rank=32, trainer_processes=1)
    | says("ours: ten times that of all weights", learning_rate=1e-5)
    | says("ours: for 80 GB", max_response_tokens=1024, gpu_memory_utilization=0.27),
    ("competition_math", "async2_released"): MATH | RELEASED,
    ("competition_math", "async10_released"): ASYNC_10 | RELEASED,
    **{("tldr", size): PYTHIA[size] for size in PYTHIA},
    **{("tldr", f"{size}_425"): PYTHIA[size] | says("Figure 3", steps=425) for size in PYTHIA},
    ("tldr", "410m_table1"): PYTHIA["410m"] | says("Table 1", steps=625, searchers=2),
    ("tldr", "2.8b_slow_beta"): PYTHIA["2.8b"] | says("Figure 4", steps=825, beta_stop_step=140),
    ("redteam", "gpt2"): REDTEAM,
    ("redteam", "llama"): LLAMA,
    ("redteam", "llama_m06"): LLAMA
    | says("appendix B.3", most_on_policy_prob=0.6, capacity_per_query=130_000),
}
DEMOS = ("arithmetic", "addends", "reach")
OURS = {*((task, "demo") for task in DEMOS), ("tldr", "tiny"), ("redteam", "tiny")}


@pytest.mark.parametrize("task, preset", EXPECTED, ids=str)
def test_a_preset_is_what_the_paper_says(task, preset):
    config, expected = build_config([task, "--preset", preset]), EXPECTED[task, preset]
    found = {name: (getattr(config, name), source) for name, (_, source) in expected.items()}
    assert found == expected
    # What no entry of the table names is as Config has it.
    own = {"task", "preset", *expected}
    others = {name: value for name, value in vars(Config()).items() if name not in own}
    assert {name: getattr(config, name) for name in others} == others


def test_every_preset_has_a_table_and_the_first_is_the_one_without_a_flag():
    presets = {task: [*find_presets(task)] for task in {*DEMOS, *(task for task, _ in EXPECTED)}}
    assert {(task, name) for task in presets for name in presets[task]} == {*EXPECTED, *OURS}
    first = {task: build_config([task]).preset for task in presets}
    assert first == {task: names[0] for task, names in presets.items()}
    chosen = {"gsm8k": "figure1", "competition_math": "async2", "tldr": "410m", "redteam": "gpt2"}
    assert first == chosen | dict.fromkeys(DEMOS, "demo")


def line(begin: float, end: float, step: int, length: int) -> float:
    return begin + (end - begin) * min(step, length) / length if length else end


STEPS = (0, 1, 32, 53, 78, 128, 140, 500, 2000, 4000)
OTHER_STEPS = [("gsm8k", "figure1", 3000), ("tldr", "410m", 625)]


@pytest.mark.parametrize("task, preset, steps", [*((*key, 0) for key in EXPECTED), *OTHER_STEPS])
def test_beta_tau_and_gamma_follow_the_schedules_of_the_preset(task, preset, steps):
    more = {"steps": steps} if steps else {}
    config = build_config([task, *flags(preset=preset, **more)])
    has = SimpleNamespace(**vars(Config()) | only(EXPECTED[task, preset]) | more)

    def in_steps(steps_or_share: float) -> int:
        return int(steps_or_share * has.steps) if 0 < steps_or_share < 1 else steps_or_share

    for step in STEPS:
        beta = has.beta
        if has.beta_final is not None:
            beta = line(has.beta, has.beta_final, step, in_steps(has.beta_steps))
        if has.beta_stop_step and step >= in_steps(has.beta_stop_step):
            beta = has.beta_final
        tau = line(has.reward_temperature, 1.0, step, has.reward_temperature_steps)
        gamma = line(1.0, has.reference_temperature, step, has.reference_temperature_steps)
        assert beta_at(config, step) == pytest.approx(beta, rel=1e-12)
        assert reward_temperature_at(config, step) == pytest.approx(tau)
        assert reference_temperature_at(config, step) == pytest.approx(gamma)


def test_beta_of_table_1_is_still_on_its_line_one_step_before_it_jumps():
    config = build_config(["tldr", "--preset", "410m_table1"])
    assert beta_at(config, 77) == pytest.approx(1 - 0.95 * 77 / 312)
    assert beta_at(config, 78) == 0.05


def test_a_share_of_the_steps_is_rounded_down_and_not_further():
    assert Config(steps=639).in_steps(1 / 8) == 79, "of 79.875"
    assert Config(steps=100).in_steps(0.29) == 29, "28.999… in floating point"
    assert (Config().in_steps(0), Config().in_steps(1), Config().in_steps(500.0)) == (0, 1, 500)


def test_a_resumed_run_keeps_the_schedule_of_beta_that_it_began_with(tmp_path):
    began = build_config(["tldr"])
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(began)))
    resumed = build_config(flags(resume=tmp_path, steps=2000))
    assert resumed.steps == 2000
    expected = [beta_at(began, step) for step in STEPS]
    assert [beta_at(resumed, step) for step in STEPS] == pytest.approx(expected)


def test_the_papers_experiments_are_commands_that_use_every_preset_that_is_the_papers():
    text = (ROOT / "docs" / "experiments.md").read_text()
    section = text.split("## The paper's experiments\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    commands = [command for row in rows for command in re.findall(r"`tba\.py ([^`]*)`", row)]
    configs = [build_config(command.split()) for command in commands]
    assert len(configs) > 25
    assert [config.task for config in configs] == [command.split()[0] for command in commands]
    assert {config.loss for config in configs} <= set(LOSSES)
    ours = {("gsm8k", "small"), ("competition_math", "lora")}
    assert {(config.task, config.preset) for config in configs} == set(EXPECTED) - ours
    on_policy = [c for c in configs if c.task == "redteam" and c.synchronous]
    assert on_policy and {config.options["exploration"] for config in on_policy} == {0}


# What a task has beside its presets.
CONSTANTS = {
    "gsm8k": {
        **says("greedy, appendix B.1", evaluation_sampling={"temperature": 0.0}),
        **says("sound masks: ours", append_eos=False, pad_is_eos=False),
    },
    "tldr": {
        **says("B.2", gold_model="cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"),
        **says("appendix B.2", evaluation_sampling={"temperature": 0.01}, append_eos=False),
    },
    "redteam": {
        **says("appendix B.3", victim_model="vicgalle/gpt2-alpaca", victim_temperature=0.7),
        **says("appendix B.3", victim_top_p=0.92, victim_tokens=30),
        **says("B.3", classifier="facebook/roberta-hate-speech-dynabench-r4-target"),
        **says("appendix B.3", embedding_model="sentence-transformers/all-MiniLM-L6-v2"),
        **says("adopted", evaluation_sampling={"temperature": 1.0, "min_tokens": 5}),
        **says("adopted: to penalise incomplete sentences", append_eos=True),
        **says("adopted", exploration=0.5, lowest_temperature=0.5),
    },
}


@pytest.mark.parametrize("task", CONSTANTS)
def test_what_a_task_has_beside_its_presets_is_what_the_paper_says(task):
    made, expected = load_task(task), only(CONSTANTS[task])
    assert {name: getattr(made, name) for name in expected} == expected


def test_red_teaming_asks_the_victim_5_times_and_tests_1024_prompts():
    assert redteam.VICTIM_RESPONSES == 5
    assert redteam.TEST_PROMPTS == len(load_task("redteam").queries("test")) == 1024
    assert tldr.UNFINISHED == -1.0, "of a summary without an end, appendix B.2"


@pytest.mark.parametrize(
    "command, gpus, trainers, searchers",
    [
        ("gsm8k", 4, 1, 3),
        ("tldr", 4, 1, 3),
        ("tldr --preset 410m_table1", 4, 1, 2),
        ("competition_math", 8, 4, 4),  # as in the launch script
    ],
)
def test_the_gpus_are_the_papers_trainers_and_searchers(command, gpus, trainers, searchers):
    places = find_places(build_config(command.split()), [str(gpu) for gpu in range(gpus)])
    assert [place.name for place in sorted(places, key=lambda place: place.gpu)] == [
        *("trainer", "trainer 1", "trainer 2", "trainer 3")[:trainers],
        *(f"searcher {rank}" for rank in range(searchers)),
    ]


def test_the_attackers_rate_falls_over_eight_times_the_steps_as_in_the_adopted_code():
    config = build_config(["redteam"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = lr_schedule(optimizer, config)
    at_step = [schedule.lr_lambdas[0](step) for step in (0, 50, 100, 5000, 40_000)]
    assert at_step == pytest.approx([0, 0.5, 1, 35_000 / 39_900, 0])
    plain = build_config(["redteam", "--decay_steps", "0"])
    assert lr_schedule(optimizer, plain).lr_lambdas[0](5000) == 0.0, "to 0 with the run"


def test_a_prompt_of_under_five_tokens_counts_as_impossible_for_the_reference():
    task = load_task("redteam")
    enough, short = np.full(5, -1.5, np.float32), np.full(4, -1.5, np.float32)
    assert np.array_equal(task.reference_logprobs(enough), enough)
    assert task.reference_logprobs(short).sum() == -500.0
    assert load_task("gsm8k").reference_logprobs(short) is short
