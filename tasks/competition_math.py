r"""MATH: competition problems, 7,500 to train on, MATH-500 to test (arXiv 2103.03874).

The answer is the last \boxed{} of a response.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from config import UserError
from tasks import Query, Task
from tasks.support.data import read_rows

# The sentence of the released code, whose f-string ate the braces behind \boxed.
PROMPT = (
    "{problem} Place your answer at end exactly inside latex box "
    "for example \\boxed12 or \\boxed51."
)
LONGEST_ANSWER = 1000  # characters in a box; what is longer is no answer, and takes long to parse
PRECISION = 300  # digits to which Math-Verify compares what is exact
SECONDS = 1  # that Math-Verify may take to parse or compare one answer
# Percent signs, spaces before three digits, a full stop.
UNREAD = re.compile(r"\\?%|\bpercent\b|~|(?<!\^\d)(?<=\d)\\[,;:! ](?=\d{3}(?!\d))|\.\s*$")
BASE = re.compile(r"\d[A-F]*_\{?(\d+)")  # Math-Verify reads 11_2 as 11
# What Math-Verify computes or cuts off while it parses, and what takes long: towers, deep braces.
UNSEEN = re.compile(
    r"binom|choose|gamma|det|vmatrix|=[^a-z,;]*=|\^[{(]*\d+(?:\^|\d{5})|}{15}", re.I
)

# TBA', Table 4 of the paper (appendix C). Its authors' later runs, on Countdown, are alike in this.
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
# Figure 6 has 2 and 10 steps of staleness, and the second
# carries its claim. Prompt and evaluation, 16 samples a problem, are the released code's, and so
# are 8 GPUs, of which 4 train and 4 search.
ASYNC_2 = dict(
    TBA_PRIME,
    model="Qwen/Qwen2.5-7B",
    loss="tba_prime",
    steps=400,
    constant_staleness=2,
    reference_reset_period=50,
    max_prompt_tokens=1024,
    max_response_tokens=2048,
    evaluation_samples=16,
    evaluation_temperature=1.0,
)
ASYNC_10 = dict(ASYNC_2, constant_staleness=10)
# What the released code does otherwise than Eq. 7 says, and than we grade.
RELEASED = dict(loss="tba_prime_released", options=dict(grade_unfinished=True))
PRESETS = {
    "async2": ASYNC_2,
    "async10": ASYNC_10,
    # Ours, for one card of 80 GB (--plan).
    "lora": dict(
        ASYNC_2,
        trainer_processes=1,
        lora_rank=32,
        learning_rate=1e-5,
        max_response_tokens=1024,
        gpu_memory_utilization=0.27,
    ),
    "async2_released": ASYNC_2 | RELEASED,
    "async10_released": ASYNC_10 | RELEASED,
}


@dataclass
class CompetitionMath(Task):
    r"""Reward 1 if the last \boxed{} of a finished response equals the gold answer, else 0.

    Equal as text, or by symbolic equivalence (Math-Verify).
    """

    data_dir: str = ""
    """Directory with train.jsonl and test.jsonl, columns problem and solution. Empty: the hub's."""
    grade_unfinished: bool = False
    """Grade a response that was cut off too, as the released code of TBA does."""

    metric = "accuracy"
    # Math-Verify's own limits are alarms between two steps of Python: a long one passes them by.
    score_timeout = 5.0
    late_score = 0.0

    def queries(self, split: str) -> Sequence[Query]:
        hub = ("HuggingFaceH4/MATH-500", None, "test")
        if split == "train":
            hub = ("DigitalLearningGmbH/MATH-lighteval", "default", "train")
        queries = []
        for place, row in read_rows(self.data_dir, split, ("problem", "solution"), hub):
            gold = last_boxed(row["solution"])
            if gold is None:
                raise UserError(f"{place}: the solution has no \\boxed{{}}")
            message = {"role": "user", "content": PROMPT.format(problem=row["problem"])}
            queries.append(Query(id=len(queries), prompt=[message], answer=gold))
        return queries

    def load(self) -> None:
        # The first call imports and builds the parser, which takes longer than a score may.
        is_correct(r"\boxed{\frac{1}{2}}", "0.5")

    def is_right(self, response: str, answer: str) -> bool:
        return is_correct(response, answer)

    def extract(self, response: str) -> str | None:
        return last_boxed(response)


def last_boxed(text: str) -> str | None:
    r"""What is in the last \boxed{} or \fbox{}, braces balanced, or behind \boxed and a space.

    None if there is none or it does not close.
    """
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"), text.rfind("\\boxed "))
    if start < 0:
        return None
    if text.startswith("\\boxed ", start):  # some of the gold solutions have it
        word = re.match(r"[^\s$]+", text[start + len("\\boxed ") :][:LONGEST_ANSWER])
        return word[0].rstrip(".,") if word else None
    begin, depth, escaped = text.index("{", start) + 1, 1, False
    for end in range(begin, min(len(text), begin + LONGEST_ANSWER)):
        character = text[end]
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return text[begin:end].strip()
    return None


def is_correct(response: str, gold: str) -> bool:
    """Whether the boxed answer equals the gold one. Only for a main thread: the limits are alarms.

    Of Math-Verify's extractors it uses the one for LaTeX, which runs nothing that it reads.
    """
    from math_verify import LatexExtractionConfig, parse, verify  # slow: only where it scores
    from sympy import Float

    answer = last_boxed(response)
    if answer is None:
        return False
    # Without percent signs, as the first grader of MATH has it: 5\% is 5, not 0.05.
    texts = [UNREAD.sub("", text) for text in (gold, answer)]
    plain_gold, plain = ("".join(text.split()) for text in texts)
    if plain == plain_gold:
        return True
    delimiters = {("\\{" in text, "(" in text) for text in (plain, plain_gold)}
    if (
        BASE.findall(plain) != BASE.findall(plain_gold)
        or delimiters == {(False, True), (True, False)}  # a tuple and a set
        or not set(UNSEEN.findall(plain)) <= set(UNSEEN.findall(plain_gold))
    ):
        return False
    as_latex = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [
        parse(f"\\boxed{{{text}}}", as_latex, fallback_mode="no_fallback", parsing_timeout=SECONDS)
        for text in texts
    ]
    if not all(parsed) or not is_computed(parsed[1][0], parsed[0][0]):
        return False
    # 1.1^n is a float of 15 digits; without one, 15 digits would make 1/2^99 equal to 1/2^98.
    has_float = any(side[0].has(Float) for side in parsed)
    digits = 15 if has_float else PRECISION
    return verify(*parsed, timeout_seconds=SECONDS, numeric_precision=digits)


def is_computed(answer, gold) -> bool:
    """Whether an answer, as SymPy has it, leaves no more to be computed than the gold one.

    No sum, integral or limit; where the gold one is a number, no function and no arithmetic.
    """
    from sympy import Add, Derivative, Eq, Limit, Mul, UnevaluatedExpr, exp
    from sympy.concrete.expr_with_limits import ExprWithLimits
    from sympy.core.function import Application

    kinds = ExprWithLimits, Limit, Derivative, UnevaluatedExpr
    if gold.free_symbols <= {getattr(gold, "lhs", None)}:
        kinds += Application, Add, Mul

    def steps(side) -> set[type]:
        parts = (side.rhs if isinstance(side, Eq) else side).atoms(*kinds)
        # A product counts if it multiplies integers: 3 x 5, but not 3 x 10^5.
        factors = {part: [x for x in part.args if x.is_Integer and x != -1] for part in parts}
        return {type(part) for part in parts if not part.is_Mul or len(factors[part]) > 1}

    return steps(answer) <= steps(gold) | {exp}
