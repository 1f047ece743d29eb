"""Presets: the settings of each task, with the table of the paper (arXiv 2503.18929) that they come from. What is not in it is marked as ours."""

_DEMO = dict(  # ours
    beta=0.1,
    steps=2000,
    queries_per_batch=32,
    responses_per_query=8,
    samples_per_query=12,
    queries_per_micro_batch=32,
    sync_period=2,
    most_on_policy_prob=0.25,
    initial_responses=2000,
    eval_every=400,
    checkpoint_every=1000,
    temperature=1.0,
    max_prompt_tokens=16,
    max_response_tokens=8,
    learning_rate=5e-4,
    lr_schedule="linear",
    warmup_steps=10,
    max_grad_norm=1.0,
)

# Table 2; section 4
_GSM8K = dict(
    model="realtreetune/rho-1b-sft-GSM8K",
    beta_final=0.004,
    beta_steps=500,
    learning_rate=1e-5,
    lr_schedule="warmup_stable_decay",
    warmup_steps=50,
    queries_per_batch=7,
    responses_per_query=20,
    samples_per_query=24,
    most_on_policy_prob=0.95,
    sync_period=2,
    initial_responses=500,
    temperature=0.7,
    reward_inverse_temperature=0.0,
    max_prompt_tokens=512,
    max_response_tokens=512,
)
# The run behind Figure 1: 700 steps of a schedule made for 1,000.
_GSM8K_FIGURE_1 = _GSM8K | dict(steps=700, beta=0.014, stable_steps=350, decay_steps=600)

# MATH with TBA', Table 4
_MATH = dict(
    model="Qwen/Qwen2.5-7B",
    loss="tba_prime",
    steps=400,
    beta=0.005,
    constant_staleness=2,
    reference_reset_period=50,
    learning_rate=1e-6,
    weight_decay=0.01,
    adam_beta2=0.99,
    max_grad_norm=1.0,
    queries_per_batch=32,
    responses_per_query=16,
    temperature=1.0,
    max_prompt_tokens=1024,
    max_response_tokens=2048,
)

# TL;DR, the table of hyper-parameters behind Table 1: beta is on its way to 0.05 at half of the steps, but set to it after an eighth.
_TLDR = dict(
    steps=256,
    beta=1.0,
    beta_final=0.05,
    beta_steps=128,
    beta_stop_step=32,
    learning_rate=3e-6,
    lr_schedule="linear",
    queries_per_batch=8,
    responses_per_query=20,
    samples_per_query=20,
    most_on_policy_prob=0.5,
    sync_period=10,
    initial_responses=10_000,
    temperature=0.7,
    reward_inverse_temperature=1.0,
    max_prompt_tokens=512,
    max_response_tokens=128,
)


def _pythia(size: str) -> dict:
    return _TLDR | dict(
        options=dict(
            reference_model=f"mnoukhov/pythia{size}-sft-tldr",
            reward_model=f"mnoukhov/pythia{size}-rm-tldr6.9b",
        )
    )


# Automated red-teaming with GPT-2, Table 6. One query, so B = 1 and K is the batch. How long tau and gamma take is ours.
_REDTEAM = dict(
    steps=5000,
    beta=0.05,
    reward_temperature=2.0,
    reward_temperature_steps=500,
    reference_temperature=1.2,
    reference_temperature_steps=2000,
    learning_rate=1e-4,
    queries_per_batch=1,
    responses_per_query=128,
    samples_per_query=128,
    capacity_per_query=100_000,
    most_on_policy_prob=0.5,
    sync_period=10,
    temperature=1.0,
    reward_inverse_temperature=1.0,
    max_prompt_tokens=64,
    max_response_tokens=20,
)

# For a machine without a GPU, in minutes: ours.
_TINY = dict(
    options=dict(tiny=True),
    learning_rate=1e-3,
    max_grad_norm=1.0,
    sync_period=2,
    max_prompt_tokens=32,
    checkpoint_every=0,
)

# Task -> name -> settings. The first of a task is the one it gets without --preset.
PRESETS: dict[str, dict[str, dict]] = {
    "arithmetic": {"demo": _DEMO},
    "addends": {"demo": _DEMO},
    "gsm8k": {
        "figure1": _GSM8K_FIGURE_1,
        "table2": _GSM8K | dict(steps=1000, beta=0.012, stable_steps=450, decay_steps=500),
        # K = 40 at the same batch size, as nearly as whole queries allow: 4 x 40 responses for 7 x 20. S in the same proportion to K is ours.
        "k40": _GSM8K_FIGURE_1
        | dict(queries_per_batch=4, responses_per_query=40, samples_per_query=48),
    },
    "competition_math": {"math": _MATH},
    "tldr": {
        "410m": _pythia("410m"),
        "1b": _pythia("1b"),
        "2.8b": _pythia("2.8b"),
        "tiny": _TLDR
        | _TINY
        | dict(
            steps=150,
            beta_steps=75,
            beta_stop_step=18,
            queries_per_micro_batch=8,
            initial_responses=200,
            max_response_tokens=10,
        ),
    },
    "redteam": {
        "gpt2": _REDTEAM,
        "tiny": _REDTEAM
        | _TINY
        | dict(
            steps=150,
            beta=0.5,
            reward_temperature_steps=15,
            reference_temperature_steps=60,
            responses_per_query=32,
            samples_per_query=32,
            initial_responses=128,
            max_response_tokens=8,
        ),
    },
}
