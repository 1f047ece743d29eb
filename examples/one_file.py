"""Trajectory Balance with Asynchrony in one file and one process, top to bottom.

    python examples/one_file.py                 # the sums of `make demo`, in a few minutes
    python examples/one_file.py --stale 20      # search with weights that are 20 steps old
    python examples/one_file.py --model Qwen/Qwen2.5-0.5B

Section and equation numbers are the paper's (arXiv 2503.18929). Left out here, and where it is:

- searchers: processes of their own with vLLM, which wait for nobody: searcher.py
- the trainer's own process, and the weights in shared memory: trainer.py, weights.py
- micro-batches by length, a low-memory pass, several GPUs, LoRA, bf16: learner.py, models/
- a buffer with bounds, no duplicates, replay by reward, queries without replacement: buffer.py
- temperatures; schedules of beta and of the learning rate: learner.py
- tasks, metrics, checkpoints, restarts: tasks/, runtime/
"""

import argparse
import random
import sys
from collections import defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the demo's base model, at the very end


@dataclass
class Row:
    """A response y to a query x, as the buffer keeps it."""

    prompt: list[int]  # token ids of x
    response: list[int]  # token ids of y, end of sequence included
    log_ref: float  # log pi_ref(y|x), a sum over the response's tokens
    reward: float  # r(y;x)
    step: int  # when it was found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory or a hub id; default: the demo's base model")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--queries", type=int, default=32, help="B, queries per batch")
    parser.add_argument("--responses", type=int, default=8, help="K, responses per query")
    parser.add_argument("--most_on_policy", type=float, default=0.25, help="m, section 4.2")
    parser.add_argument("--stale", type=int, default=0, help="steps that the search lags behind")
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--learning_rate", type=float, default=5e-4)
    parser.add_argument("--max_tokens", type=int, default=8, help="of a response")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


# ---- the task: sums of two numbers below 100 ----


def all_sums() -> list[tuple[str, str]]:
    """Every query and its right answer, such as ("07+58=", "065")."""
    return [(f"{a:02}+{b:02}=", f"{a + b:03}") for a in range(100) for b in range(100)]


# ---- the policy ----


@torch.no_grad()
def respond(model, tokenizer, prompts: list[str], max_tokens: int, greedy: bool = False):
    """Generate a response to each prompt. Returns token ids of prompts and of responses."""
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    sampling = dict(do_sample=not greedy, top_k=0, top_p=1.0, temperature=1.0)  # from pi itself
    out = model.generate(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        max_new_tokens=max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        **sampling,
    )
    start, end = batch.input_ids.shape[1], tokenizer.eos_token_id
    responses = []
    for row in out[:, start:].tolist():
        responses.append(row[: row.index(end) + 1] if end in row else row)
    return tokenizer(prompts).input_ids, responses


def log_probs(model, rows: list[Row]) -> Tensor:
    """log pi(y|x) of each row, a sum over the tokens of its response: (N,)."""
    length = max(len(row.prompt) + len(row.response) for row in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)  # (N, L), padded on the right
    attended, in_response = (torch.zeros(len(rows), length, dtype=torch.bool) for _ in range(2))
    for i, row in enumerate(rows):
        begin, end = len(row.prompt), len(row.prompt) + len(row.response)
        ids[i, :end] = torch.tensor(row.prompt + row.response)
        attended[i, :end] = True
        in_response[i, begin:end] = True
    logits = model(input_ids=ids, attention_mask=attended.long()).logits  # (N, L, V)
    # Position t predicts token t + 1.
    token_logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]  # (N, L-1)
    return torch.where(in_response[:, 1:], token_logprobs, 0.0).sum(1)


# ---- the objective ----


def trajectory_balance(log_pi: Tensor, rows: list[Row], group_size: int, beta: float) -> Tensor:
    """Equations 3 to 5: squared residuals of log Z + log pi - log pi_ref - r / beta.

    log_pi: (B * K,), the K = group_size responses of a query side by side.
    """
    log_ref = torch.tensor([row.log_ref for row in rows])  # (B * K,)
    rewards = torch.tensor([row.reward for row in rows])  # (B * K,)
    target = log_ref + rewards / beta  # (B * K,) log of the unnormalised pi*
    # VarGrad (Eq. 4): log Z(x) is what the K responses of x say on average. Not differentiated.
    log_z = (target - log_pi).detach().view(-1, group_size).mean(1)  # (B,)
    residual = log_z.repeat_interleave(group_size) + log_pi - target  # (B * K,)
    return residual.square().mean()


# ---- search, buffer, training ----


def search(policy, reference, tokenizer, queries, args, step: int) -> list[Row]:
    """Find K responses to each query, with r(y;x) and log pi_ref(y|x)."""
    repeated = [query for query in queries for _ in range(args.responses)]
    prompts, responses = respond(policy, tokenizer, [p for p, _ in repeated], args.max_tokens)
    rows = []
    for (_, answer), prompt, response in zip(repeated, prompts, responses):
        text = tokenizer.decode(response, skip_special_tokens=True)
        is_right = text == answer and response[-1] == tokenizer.eos_token_id
        rows.append(Row(prompt, response, 0.0, float(is_right), step))
    with torch.no_grad():
        for row, log_ref in zip(rows, log_probs(reference, rows).tolist()):
            row.log_ref = log_ref
    return rows


def draw(buffer: dict[tuple, list[Row]], latest: list[tuple], args) -> list[Row]:
    """B queries and K responses of each (section 4.2).

    With probability m a query is one of the latest search, else any that was ever searched. Its
    responses are any of its own.
    """
    batch = []
    for _ in range(args.queries):
        known = latest if random.random() < args.most_on_policy else list(buffer)
        batch += random.sample(buffer[random.choice(known)], args.responses)
    return batch


def main() -> None:
    args = arguments()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    name = args.model
    if name is None:
        from tasks import load_task  # the rest of the project is not needed

        name = load_task("arithmetic").base_model()
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    policy, reference = (AutoModelForCausalLM.from_pretrained(name).eval() for _ in range(2))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)

    sums = all_sums()
    random.shuffle(sums)
    test, train = sums[:1000], sums[1000:]
    buffer: dict[tuple, list[Row]] = defaultdict(list)  # D_global: prompt -> its responses
    searcher = deepcopy(policy)  # what searches; it has weights of some steps ago
    published = deque(maxlen=args.stale + 1)  # the last weights, the oldest first
    for step in range(args.steps):
        published.append({name: w.detach().clone() for name, w in policy.state_dict().items()})
        searcher.load_state_dict(published[0])
        queries = random.sample(train, args.queries)
        found = search(searcher, reference, tokenizer, queries, args, step)
        for row in found:
            buffer[tuple(row.prompt)].append(row)

        rows = draw(buffer, list({tuple(row.prompt) for row in found}), args)
        loss = trajectory_balance(log_probs(policy, rows), rows, args.responses, args.beta)
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.steps)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        mean_reward = sum(row.reward for row in found) / len(found)
        age = step - sum(row.step for row in rows) / len(rows)
        print(f"step {step + 1}  reward {mean_reward:.3f}  loss {loss:.4g}  age {age:.0f}")

    _, responses = respond(policy, tokenizer, [p for p, _ in test], args.max_tokens, greedy=True)
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    right = [text == answer for text, (_, answer) in zip(texts, test)]
    print(f"final accuracy: {sum(right) / len(right):.3f}")


if __name__ == "__main__":
    main()
