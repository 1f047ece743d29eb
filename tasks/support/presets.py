"""Settings that several tasks share. They are ours: for machines without a GPU, in minutes."""

# What a task's small stand-ins for models want otherwise than its preset for the real ones.
TINY = dict(
    options=dict(tiny=True),
    learning_rate=1e-3,
    max_grad_norm=1.0,
    sync_period=2,
    max_prompt_tokens=32,
    checkpoint_every=0,
)
