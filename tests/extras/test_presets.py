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
from extras.objectives import LOSSES
from launch.command_line import build_config, find_presets
from learner import Learner, beta_at, lr_schedule
from rollouts import Response, make_tokens
from tasks import load_task, redteam, tldr


def says(source: str, **values) -> dict:
    """Return these values of settings; the source stands beside them for the reader."""
    return values


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
    **says("ours: benchmarks/results/master_weights.md", learning_rate=1e-6),
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
COUNTDOWN = {
    **says("the authors' later report", model="Qwen/Qwen3-4B-Instruct-2507", steps=720),
    **says("the same", beta=0.005, learning_rate=1e-6, constant_staleness=10, eval_every=20),
    **says("the same: 512 rows", queries_per_batch=32, responses_per_query=16),
    **says("the same: 4,096 tokens", max_prompt_tokens=512, max_response_tokens=3584),
    **says("the same: the surrogate", loss="tba_ema"),
    **says("as for MATH", trainer_processes=4, temperature=1.0, max_grad_norm=1.0),
    **says("as for MATH", weight_decay=0.01, adam_beta2=0.99),
    **says("rule", sync_period=1, samples_per_query=16),
    **says("reasoning-gym's dataset", options={"dataset": "countdown", "chat": True}),
}
EXPECTED["reasoning_gym", "countdown"] = COUNTDOWN
DEMOS = ("arithmetic", "reach")
OURS = {*((task, "demo") for task in DEMOS), ("tldr", "tiny"), ("redteam", "tiny")}
OURS.add(("reasoning_gym", "plain"))


@pytest.mark.parametrize("task, preset", EXPECTED, ids=str)
def test_a_preset_is_what_the_paper_says(task, preset):
    # What no entry of the table names is as Config has it.
    expected = vars(Config()) | {"task": task, "preset": preset} | EXPECTED[task, preset]
    assert vars(build_config([task, "--preset", preset])) == expected


def test_every_preset_has_a_table_and_the_first_is_the_one_without_a_flag():
    presets = {task: [*find_presets(task)] for task in {*DEMOS, *(task for task, _ in EXPECTED)}}
    assert {(task, name) for task in presets for name in presets[task]} == {*EXPECTED, *OURS}
    first = {task: build_config([task]).preset for task in presets}
    assert first == {task: names[0] for task, names in presets.items()}
    chosen = {"gsm8k": "figure1", "competition_math": "async2", "tldr": "410m", "redteam": "gpt2"}
    chosen["reasoning_gym"] = "plain"
    assert first == chosen | dict.fromkeys(DEMOS, "demo")


@pytest.mark.parametrize(
    "words, betas",
    [
        ("gsm8k", {0: 0.014, 250: 0.009, 500: 0.004, 700: 0.004}),
        ("gsm8k --preset table2", {250: 0.008}),
        ("gsm8k --steps 3000", {250: 0.009}),  # 500 steps, however long the run
        ("tldr", {31: 1 - 0.95 * 31 / 128, 32: 0.05}),
        ("tldr --steps 512", {63: 1 - 0.95 * 63 / 256, 64: 0.05}),  # shares of the steps
        ("tldr --preset 410m_table1", {77: 1 - 0.95 * 77 / 312, 78: 0.05}),
        ("tldr --preset 2.8b_slow_beta", {139: 1 - 0.95 * 139 / 412, 140: 0.05}),
        ("competition_math", {0: 0.005, 399: 0.005}),
    ],
)
def test_beta_goes_down_the_papers_line_and_jumps_at_its_step(words, betas):
    config = build_config(words.split())
    assert {step: beta_at(config, step) for step in betas} == pytest.approx(betas, rel=1e-12)


def test_tau_and_gamma_of_red_teaming_go_down_and_up_their_lines():
    config, steps = build_config(["redteam", "--preset", "llama"]), (0, 500, 1000, 2000, 4000)
    tokens = make_tokens([1], behavior_logprob=[0.0])
    tokens["ref_logprob"] = 1.0
    row = Response(query_id=0, version=0, prompt=np.arange(1), tokens=tokens, reward=0.0)
    learner, taus, gammas = SimpleNamespace(config=config), [], []
    learner.logprobs = lambda rows: torch.zeros(1, 1)
    for learner.step in steps:
        inputs = Learner.loss_inputs(learner, [row])
        taus.append(inputs.beta / beta_at(config, learner.step))
        gammas.append(1 / (inputs.ref_logprobs.item() * taus[-1]))
    assert taus == pytest.approx([2.0, 1.5, 1.0, 1.0, 1.0])
    assert gammas == pytest.approx([1.0, 1.05, 1.1, 1.2, 1.2])


def test_a_resumed_run_keeps_the_schedule_of_beta_that_it_began_with(tmp_path):
    began = build_config(["tldr"])
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(began)))
    resumed = build_config(flags(resume=tmp_path, steps=2000))
    assert resumed.steps == 2000
    for step in (16, 31, 32, 1000):
        assert beta_at(resumed, step) == pytest.approx(beta_at(began, step))


def test_the_papers_experiments_are_commands_that_use_every_preset_that_is_the_papers():
    text = (ROOT / "docs" / "paper.md").read_text()
    commands = re.findall(r"`tba\.py ([^`]*)`", text)  # a long one goes on in the next line
    configs = [build_config(command.split()) for command in commands]
    assert len(configs) > 25
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
    made, expected = load_task(task), CONSTANTS[task]
    assert {name: getattr(made, name) for name in expected} == expected


def test_red_teaming_asks_the_victim_5_times_and_tests_1024_prompts():
    assert redteam.VICTIM_RESPONSES == 5
    assert redteam.TEST_PROMPTS == len(load_task("redteam").queries("test")) == 1024
    assert tldr.UNFINISHED == -1.0, "of a summary without an end, appendix B.2"


def test_the_attackers_rate_falls_over_eight_times_the_steps_as_in_the_adopted_code():
    config = build_config(["redteam"])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    schedule = lr_schedule(optimizer, config)
    at_step = [schedule.lr_lambdas[0](step) for step in (0, 50, 100, 5000, 40_000)]
    assert at_step == pytest.approx([0, 0.5, 1, 35_000 / 39_900, 0])


def test_a_prompt_of_under_five_tokens_counts_as_impossible_for_the_reference():
    task = load_task("redteam")
    enough, short = np.full(5, -1.5, np.float32), np.full(4, -1.5, np.float32)
    assert np.array_equal(task.reference_logprobs(enough), enough)
    assert task.reference_logprobs(short).sum() == -500.0
