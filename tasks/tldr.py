"""TL;DR: summaries of Reddit posts, rewarded by a model of human preferences (arXiv 2009.01325)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from config import Config
from tasks import Query, Task
from tasks.support.data import read_rows

DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
UNFINISHED = -1.0  # reward of a response without end-of-sequence

# Table 3 of the paper (appendix B.2), which is behind Figure 3: beta goes linearly from 1, to reach
# 0.05 at steps / 2, but jumps to 0.05 at steps / 8.
COMMON = dict(
    steps=256,
    beta=1.0,
    beta_final=0.05,
    beta_steps=1 / 2,
    beta_stop_step=1 / 8,
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
# For vLLM, by the plan for cards of 80 GB (--plan): reward and gold model lie beside it. Ours.
SHARES = {"410m": 0.55, "1b": 0.45, "2.8b": 0.2}


def pythia(size: str, **settings) -> dict:
    """The settings for Pythia of that size, and what differs from Table 3."""
    models = dict(
        reference_model=f"mnoukhov/pythia{size}-sft-tldr",
        reward_model=f"mnoukhov/pythia{size}-rm-tldr6.9b",
    )
    return dict(COMMON, options=models, gpu_memory_utilization=SHARES[size]) | settings


# What a task's small stand-ins for models want otherwise than its preset for the real ones. Ours:
# for machines without a GPU, in minutes.
TINY = dict(
    options=dict(tiny=True),
    learning_rate=1e-3,
    max_grad_norm=1.0,
    sync_period=2,
    max_prompt_tokens=32,
    checkpoint_every=0,
)
PRESETS = {
    "410m": pythia("410m"),
    "410m_425": pythia("410m", steps=425),  # Figure 3's longer run
    "410m_table1": pythia("410m", steps=625, searchers=2),
    "1b": pythia("1b"),
    "1b_425": pythia("1b", steps=425),
    "2.8b": pythia("2.8b"),
    "2.8b_425": pythia("2.8b", steps=425),
    # Figure 4: beta gets to its end at step 140, not after an eighth of the steps.
    "2.8b_slow_beta": pythia("2.8b", steps=825, beta_stop_step=140),
    "tiny": dict(
        COMMON | TINY,
        steps=150,
        tokens_per_micro_batch=2000,
        initial_responses=200,
        max_response_tokens=10,
    ),
}


@dataclass
class TLDR(Task):
    """Reward: the reward model's score of post and summary; -1 for a summary without an end."""

    data_dir: str = ""
    """Directory with train.jsonl and test.jsonl. Empty: the hub's, with validation to test on."""
    reference_model: str = "mnoukhov/pythia410m-sft-tldr"
    """The policy at the start, and the reference of the perplexity in the evaluation."""
    reward_model: str = "mnoukhov/pythia410m-rm-tldr6.9b"
    """Scores summaries in training: a causal sequence classifier with one label."""
    reward_tokenizer: str = ""
    """The model that has the tokenizer of reward_model. Empty: itself."""
    gold_model: str = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    """Scores them in the evaluation."""
    gold_tokenizer: str = ""
    """The model that has the tokenizer of gold_model. Empty: itself."""
    tiny: bool = False
    """The preset tiny: posts of a few words, and models for them made on the spot."""

    metric = "reward"
    evaluation_sampling = {"temperature": 0.01}

    def __post_init__(self):
        if self.tiny:
            from tasks.support.tiny_tldr import stand_ins

            made = stand_ins()
            self.data_dir = str(made)
            self.reference_model = str(made / "policy")
            self.reward_model, self.gold_model = str(made / "reward"), str(made / "gold")

    def base_model(self) -> str:
        return self.reference_model

    def queries(self, split: str) -> Sequence[Query]:
        """answer: the reference summary."""
        hub = (DATASET, None, "validation" if split == "test" else split)
        rows = read_rows(self.data_dir, split, ("query", "reference_response"), hub)
        pairs = [(row["query"], row["reference_response"]) for _, row in rows]
        return [Query(i, prompt, answer) for i, (prompt, answer) in enumerate(pairs)]

    def prepare(self) -> None:
        from tasks.support.classifier import TaskModel, prepare_classifier

        TaskModel.prepare("--reference_model", self.reference_model)
        prepare_classifier("--reward_model", self.reward_model, tokenizer=self.reward_tokenizer)
        prepare_classifier("--gold_model", self.gold_model, tokenizer=self.gold_tokenizer)

    def models(self) -> list[str]:
        return [self.reward_model, self.gold_model]

    def load(self) -> None:
        from tasks.support.classifier import Classifier

        self.reward = Classifier(self.reward_model, self.reward_tokenizer)

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        texts = [query.prompt + response for query, response in zip(queries, responses)]
        return np.where(finished, self.reward.rewards(texts), UNFINISHED).tolist()

    def evaluate(
        self, queries: list[Query], responses: list[str], finished: list[bool], scores: np.ndarray
    ) -> dict[str, np.ndarray]:
        """The metrics win_rate, perplexity and reward.

        win_rate: gold model, generated against reference summary. perplexity: under the reference
        policy, prompt tokens in the denominator.
        """
        from tasks.support.classifier import Classifier

        gold = Classifier(self.gold_model, self.gold_tokenizer)
        prompts = [query.prompt for query in queries]
        end = gold.tokenizer.eos_token
        texts = [prompt + response for prompt, response in zip(prompts, responses)]
        ideal = [query.prompt + query.answer.removesuffix(end) for query in queries]
        generated, reference = gold.rewards(texts), gold.rewards(ideal)
        del gold  # billions of parameters: make room for the reference policy
        return {
            "win_rate": wins(generated, reference),
            "perplexity": perplexities(self.reference_model, prompts, responses, finished),
            "reward": scores,
        }


def wins(generated: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """(N,) 1 where the generated summary has the higher score; a tie is no win."""
    return (generated > reference).astype(float)


def perplexities(
    model: str, prompts: list[str], responses: list[str], finished: list[bool]
) -> np.ndarray:
    """What the paper calls KL/perplexity, of each response under the model: (N,).

    exp(negative log-likelihood of the response / number of tokens of prompt and response).
    """
    import torch

    from models.device import compute_dtype, device
    from models.logprobs import response_logprobs
    from models.policy import load_policy
    from models.tokens import load_tokenizer

    config = Config(model=model)
    policy, tokenizer = load_policy(config, device()), load_tokenizer(config)
    prompt_ids = [np.array(ids) for ids in tokenizer(prompts).input_ids]
    ended = [text + tokenizer.eos_token * done for text, done in zip(responses, finished)]
    response_ids = tokenizer(ended, add_special_tokens=False).input_ids
    response_ids = [np.array(ids, int) for ids in response_ids]
    with torch.no_grad():
        how = dict(temperature=1.0, dtype=compute_dtype(config))
        logprobs = response_logprobs(policy, prompt_ids, response_ids, **how)  # (N, T)
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompt_ids, response_ids)]
    return np.exp(-logprobs.sum(1).cpu().numpy() / lengths)
