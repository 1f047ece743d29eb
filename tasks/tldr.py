"""TL;DR: summaries of Reddit posts, rewarded by a model that was trained on human preferences (https://arxiv.org/abs/2009.01325)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks import Query, Task
from tasks._data import read_rows

DATASET = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
UNFINISHED = -1.0  # reward of a response without end-of-sequence


@dataclass
class TLDR(Task):
    """Reward: the reward model's score of post and summary; -1 for a summary without an end."""

    data_dir: str = ""
    """Directory with train.jsonl and test.jsonl. Empty: the dataset of the hub, with its validation split to test on."""
    reference_model: str = "mnoukhov/pythia410m-sft-tldr"
    """The policy at the start, and the reference of the perplexity in the evaluation."""
    reward_model: str = "mnoukhov/pythia410m-rm-tldr6.9b"
    """Scores summaries in training: a causal sequence classifier with one label."""
    gold_model: str = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    """Scores them in the evaluation."""
    tiny: bool = False
    """The preset tiny: posts of a few words, and models for them made on the spot."""

    metric = "reward"
    evaluation_sampling = {"temperature": 0.01}

    def __post_init__(self):
        if self.tiny:
            from tasks import _tiny_tldr
            from tasks._pretraining import cached

            made = cached(_tiny_tldr.build, _tiny_tldr.__file__)
            self.data_dir = str(made)
            self.reference_model, self.reward_model, self.gold_model = (
                str(made / name) for name in ("policy", "reward", "gold")
            )

    def base_model(self) -> str:
        return self.reference_model

    def queries(self, split: str) -> Sequence[Query]:
        """answer: the reference summary."""
        columns = ("query", "reference_response", "query_reference_response")
        rows = read_rows(
            self.data_dir,
            split,
            columns,
            hub=(DATASET, None, "validation" if split == "test" else split),
        )
        return [
            Query(id=i, prompt=row["query"], answer=row["reference_response"])
            for i, (_, row) in enumerate(rows)
        ]

    def prepare(self) -> None:
        from preflight import fetch_model, find_model
        from tasks._models import prepare_classifier

        fetch_model("--reference_model", find_model("--reference_model", self.reference_model))
        prepare_classifier("--reward_model", self.reward_model, labels=1)
        prepare_classifier("--gold_model", self.gold_model, labels=1)

    def load(self) -> None:
        from tasks._models import Classifier

        self.reward = Classifier(self.reward_model)

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        rewards = self.reward.rewards(
            [query.prompt + response for query, response in zip(queries, responses)]
        )
        return np.where(finished, rewards, UNFINISHED).tolist()

    def evaluate(
        self, queries: list[Query], responses: list[str], finished: list[bool], scores: np.ndarray
    ) -> dict[str, np.ndarray]:
        """win_rate: gold model, generated against reference summary. perplexity: under the reference policy, prompt tokens in the denominator."""
        from tasks._models import Classifier

        gold = Classifier(self.gold_model)
        prompts = [query.prompt for query in queries]
        end = gold.tokenizer.eos_token
        generated = gold.rewards(
            [prompt + response for prompt, response in zip(prompts, responses)]
        )
        reference = gold.rewards(
            [query.prompt + query.answer.removesuffix(end) for query in queries]
        )
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
    """(N,) exp(negative log-likelihood of the response / number of tokens of prompt and response): what the paper calls KL/perplexity."""
    from config import Config
    from policy import load_policy, load_tokenizer, response_logprobs
    from processes import device
    import torch

    config = Config(model=model)
    policy, tokenizer = load_policy(config, device()), load_tokenizer(config)
    prompt_ids = [np.array(tokenizer(prompt).input_ids) for prompt in prompts]
    ends = [tokenizer.eos_token if done else "" for done in finished]
    response_ids = [
        np.array(tokenizer(response + end, add_special_tokens=False).input_ids, int)
        for response, end in zip(responses, ends)
    ]
    with torch.no_grad():
        nll = (
            -response_logprobs(policy, prompt_ids, response_ids, temperature=1.0)
            .sum(1)
            .cpu()
            .numpy()
        )  # (N,)
    return np.exp(
        nll / [len(prompt) + len(response) for prompt, response in zip(prompt_ids, response_ids)]
    )
