"""A task of your own with a model for a reward: replies that a sentiment classifier likes.

python tba.py examples/kind_replies.py --model Qwen/Qwen2.5-0.5B-Instruct
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks import Query, Task

REMARKS = [
    "The train is late",
    "I burnt the cake",
    "It rains again",
    "My plant died",
    "The shop was closed",
    "I lost my umbrella",
    "The film was long",
    "The soup is cold",
    "My phone broke",
    "The lift is stuck",
    "I missed the bus",
    "The coffee ran out",
]
WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

PRESETS = {"short": dict(beta=0.05, max_response_tokens=60)}


@dataclass
class KindReplies(Task):
    """The probability of the classifier's positive label; 0 for a reply that was cut off."""

    classifier: str = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
    """A sequence classifier, local or from the hub. The fields of a task are flags."""
    label: str = "POSITIVE"
    """The label whose probability is the reward."""

    def queries(self, split: str) -> Sequence[Query]:
        days = WEEKDAYS[-1:] if split == "test" else WEEKDAYS[:-1]
        texts = [f"A: {remark}, and on a {day}.\nB:" for remark in REMARKS for day in days]
        return [Query(id=i, prompt=text, answer=None) for i, text in enumerate(texts)]

    def prepare(self) -> None:
        from tasks.support.classifier import prepare_classifier

        prepare_classifier("--classifier", self.classifier, label=self.label)

    def load(self) -> None:
        from tasks.support.classifier import Classifier

        self.model = Classifier(self.classifier)

    def score(
        self, queries: list[Query], responses: list[str], finished: list[bool]
    ) -> list[float]:
        probabilities = self.model.probabilities(responses, self.label)
        return [float(p) if done else 0.0 for p, done in zip(probabilities, finished)]
