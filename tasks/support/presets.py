"""Settings that several tasks share."""

# TBA' on MATH (Table 4 of the paper). Its authors' later runs, on Countdown, are alike in these, or
# do not say.
TBA_PRIME = dict(
    trainer_processes=4,
    beta=0.005,
    learning_rate=1e-6,
    weight_decay=0.01,
    adam_beta2=0.99,
    max_grad_norm=1.0,
    queries_per_batch=32,
    responses_per_query=16,
    temperature=1.0,
)
# What a task's small stand-ins for models want otherwise than its preset for the real ones. It is
# ours: for machines without a GPU, in minutes.
TINY = dict(
    options=dict(tiny=True),
    learning_rate=1e-3,
    max_grad_norm=1.0,
    sync_period=2,
    max_prompt_tokens=32,
    checkpoint_every=0,
)
