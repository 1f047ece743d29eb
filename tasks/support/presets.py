"""Settings that several tasks share. They are ours: for machines without a GPU, in minutes."""

# A base model of 130,000 parameters that adds numbers (tasks/support/pupil.py).
DEMO = dict(
    beta=0.1,
    steps=2000,
    queries_per_batch=32,
    responses_per_query=8,
    samples_per_query=12,
    tokens_per_micro_batch=4000,
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

# What a task's small stand-ins for models want otherwise than its preset for the real ones.
TINY = dict(
    options=dict(tiny=True),
    learning_rate=1e-3,
    max_grad_norm=1.0,
    sync_period=2,
    max_prompt_tokens=32,
    checkpoint_every=0,
)
