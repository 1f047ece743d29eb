"""What the engine generates for rollouts: the S responses to a query, in one request."""

from transformers import PreTrainedTokenizerBase

from config import Config
from models.engine import Engine, completion_arrays
from runtime.modes.free_running import Rollout
from runtime.responses.scoring import RewardScorer, decode
from tasks import Task


class Generation:
    """Has the engine generate the responses of rollouts that are started, and returns them whole.

    scorer: whose workers an environment runs in (episodes.py).
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        engine: Engine,
        scorer: RewardScorer,
    ):
        self.config, self.tokenizer, self.engine, self.scorer = config, tokenizer, engine, scorer
        # Appended to responses that were cut off, where the task wants that.
        self.final_token = tokenizer.eos_token_id if task.append_eos else None
        self.rollouts: dict[str, Rollout] = {}  # in the engine, by request

    @property
    def responses(self) -> int:
        """Responses that are not finished, those that wait for room included."""
        return self.engine.rows

    def start(self, rollout: Rollout) -> None:
        """Generate the responses of a rollout, which has its prompt, version and sampling.

        The engine takes the version for the sake of its cache of prefixes.
        """
        self.engine.add(rollout.request, rollout.prompt, rollout.version, **rollout.sampling)
        self.rollouts[rollout.request] = rollout

    def step(self, version: int) -> list[Rollout]:
        """Generate one token of every response. Returns the rollouts that finished with it.

        version: of the weights in the engine.
        """
        generated = []
        for output in self.engine.step():
            if rollout := self.rollouts.pop(output.request_id, None):
                rollout.last_version, completions = version, output.outputs
                rollout.texts, rollout.finished = decode(self.tokenizer, completions)
                rollout.arrays = [completion_arrays(c, self.final_token) for c in completions]
                generated.append(rollout)
        return generated
