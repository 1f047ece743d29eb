"""A model's folder: what is refused at the start, what loads as before, what is saved with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import CHAT_TEMPLATE
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from config import Config, UserError
from launch.checks import check_tokenizer
from models.folder import fetch_weights, save_model
from models.loading import load_model, read_tokenizer
from models.policy import load_policy

SAFE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
HEAD, UP = "lm_head.weight", "model.layers.0.mlp.up_proj.weight"
Spoil = Callable[[Path], object]


def weights(change: Callable[[dict], dict], as_bin: bool = False) -> Spoil:
    """Have the weights of a folder changed, from a dict of tensors to another."""

    def spoil(folder: Path) -> None:
        changed = change(load_file(folder / SAFE))
        changed = {name: tensor.clone() for name, tensor in changed.items()}
        save_file(changed, folder / SAFE, {"format": "pt"})
        if as_bin:
            (folder / SAFE).unlink()
            torch.save(changed, folder / "pytorch_model.bin")

    return spoil


def fields(file: str, **changes) -> Spoil:
    """Have fields of a JSON file changed, or the file made."""

    def spoil(folder: Path) -> None:
        content = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps(content | changes))

    return spoil


def without(*names: str):
    return lambda of: {name: tensor for name, tensor in of.items() if name not in names}


def renamed(old: str, new: str):
    return lambda of: {name.replace(old, new, 1): tensor for name, tensor in of.items()}


def plus(more: dict):
    return lambda of: of | more


def copied(file: str, to: str) -> Spoil:
    return lambda folder: shutil.copy(folder / file, folder / to)


def cut(file: str, share: float = 0.6) -> Spoil:
    return lambda f: (f / file).write_bytes((d := (f / file).read_bytes())[: int(share * len(d))])


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
BIAS = {UP.replace("weight", "bias"): torch.ones(128)}
# What is done to a folder, one after the other, and what is said then; …: any words.
BAD_FOLDERS = {
    "no head": (weights(without(HEAD)), f"lacks {HEAD} of its LlamaForCausalLM: save it whole"),
    "one missing": (weights(without(UP)), f"lacks {UP} of its"),
    "no head in .bin": (weights(without(HEAD), as_bin=True), f"lacks {HEAD} of its"),
    "compiled": (weights(renamed("", "_orig_mod.")), "and 18 more of …take '_orig_mod.' off"),
    "a layer more": (fields("config.json", num_hidden_layers=3), "lacks model.layers.2.…6 more"),
    "a layer less": (fields("config.json", num_hidden_layers=1), "has no place for model.layers.1"),
    "a bias": (weights(plus(BIAS)), "has no place for model.layers.0.mlp.up_proj.bias"),
    "a shape": (weights(plus({UP: torch.ones(64, 64)})), "the shape (64, 64), …(128, 64)"),
    "pointer": (lambda f: (f / SAFE).write_text(POINTER), f"no whole {SAFE}: …git-lfs's pointer"),
    "cut short": (cut(SAFE), f"has no whole {SAFE}: "),
    "empty": (cut(SAFE, 0), f"has no whole {SAFE}: "),
    "none": (lambda f: (f / SAFE).unlink(), "lacks weights for transformers"),
    "a backup": (copied(SAFE, "old.safetensors"), f"read old.safetensors, the trainer {SAFE}"),
    "consolidated": (copied(SAFE, "consolidated.safetensors"), "would read consolidated.safetens"),
    "an old index": (fields(INDEX, weight_map={HEAD: SHARD}), f"vLLM would read {SHARD}, the trai"),
    "an adapter": (fields("adapter_config.json"), "for its adapter_config.json transformers"),
}


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_folder_that_is_not_its_model_is_refused_in_one_line(kind, untied_model, tmp_path, capfd):
    spoil, says = BAD_FOLDERS[kind]
    folder = Path(shutil.copytree(untied_model, tmp_path / "model"))
    spoil(folder)
    with pytest.raises(UserError) as error:
        fetch_weights("--model", str(folder), is_policy=True)
    line = str(error.value)
    assert all(part in line for part in says.split("…")) and str(folder) in line, line
    assert "\n" not in line and capfd.readouterr() == ("", ""), "no report of transformers"


def test_shards_and_bin_files_that_are_not_whole_are_named(untied_model, tmp_path):
    folder = Path(shutil.copytree(untied_model, tmp_path / "model"))
    weights(lambda of: of, as_bin=True)(folder)
    cut("pytorch_model.bin")(folder)
    copied("pytorch_model.bin", "old.bin")(folder)
    for says in "vLLM would read old.bin", "has no whole pytorch_model.bin", "index of weights":
        with pytest.raises(UserError, match=says):
            fetch_weights("--model", str(folder), is_policy=says.startswith("vLLM"))
        if "whole" in says:
            fields(INDEX, weights={})(folder)
    fields(INDEX, weight_map={HEAD: SHARD})(folder)
    with pytest.raises(UserError, match=f"lacks {SHARD}"):
        fetch_weights("--model", str(folder))


SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
SHAPE |= dict(vocab_size=257, max_position_embeddings=64, pad_token_id=256, eos_token_id=256)
GPT2 = dict(n_embd=64, n_layer=2, n_head=2, n_positions=64, vocab_size=257)
OLD_GPT2 = {"h.0.attn.bias": torch.ones(1, 1, 64, 64), "h.0.attn.masked_bias": torch.tensor(-1e4)}
OLD_NEOX = "bias masked_bias rotary_emb.inv_freq".split()
NEOX = {f"gpt_neox.layers.0.attention.{name}": torch.ones(4) for name in OLD_NEOX}
CAUSAL, REWARD = AutoModelForCausalLM, AutoModelForSequenceClassification
GOOD = {
    "buffers": ("GPT2LMHeadModel", GPT2, plus(OLD_GPT2), CAUSAL),
    "no prefix": ("GPT2LMHeadModel", GPT2, renamed("transformer.", ""), CAUSAL),
    "an unused head": ("GPT2LMHeadModel", GPT2, plus({"v_head.weight": torch.ones(1)}), CAUSAL),
    "reward": ("GPTNeoXForSequenceClassification", SHAPE | {"num_labels": 1}, plus(NEOX), REWARD),
    "experts": ("MixtralForCausalLM", SHAPE | {"num_local_experts": 2}, plus({}), CAUSAL),
    "an encoder": ("BertForMaskedLM", SHAPE, plus({}), AutoModel),
}


@pytest.mark.parametrize("kind", GOOD)
def test_what_loads_well_is_taken_as_before(kind, tmp_path):
    name, shape, change, loads = GOOD[kind]
    made = getattr(transformers, name)
    made(made.config_class(**shape)).save_pretrained(tmp_path)
    weights(change)(tmp_path)
    assert fetch_weights("--model", str(tmp_path), loads) == str(tmp_path)
    load_model("--model", str(tmp_path), loads)
    if kind == "reward":
        weights(without("score.weight"))(tmp_path)
        for check in fetch_weights, load_model:
            with pytest.raises(UserError, match="lacks score.weight of its GPTNeoXForSequence"):
                check("--reward_model", str(tmp_path), loads)


def test_tied_heads_and_bin_files_are_taken_as_before(tied_model, tmp_path):
    folder = Path(shutil.copytree(tied_model, tmp_path / "model"))
    for as_bin in False, True:
        weights(lambda of: of | {HEAD: of["model.embed_tokens.weight"]}, as_bin)(folder)
        (folder / "training_args.bin").write_bytes(b"x")
        fetch_weights("--model", str(folder), is_policy=True)
        load_policy(Config(model=str(folder)), torch.device("cpu"))


@pytest.fixture
def chat_folder(chat_model, tmp_path) -> Path:
    return Path(shutil.copytree(chat_model, tmp_path / "chat"))


def test_the_tokenizer_is_that_of_tokenizer_json_whatever_class_is_named(chat_folder):
    fields("tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")(chat_folder)
    tokenizer, text = read_tokenizer("--model", str(chat_folder)), "What is 2 + 3?\n\nÜ"
    plain = Tokenizer.from_file(str(chat_folder / "tokenizer.json"))
    assert tokenizer(text).input_ids == plain.encode(text).ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token == "<eos>" and tokenizer.chat_template == CHAT_TEMPLATE


def test_of_a_mistrals_two_tokenizers_tokenizer_json_is_read_and_needed(chat_folder):
    fields("config.json", model_type="mistral", architectures=["MistralForCausalLM"])(chat_folder)
    (chat_folder / "tekken.json").write_text("{}")
    tokenizer = read_tokenizer("--model", str(chat_folder))
    assert tokenizer.is_fast and tokenizer.chat_template == CHAT_TEMPLATE
    (chat_folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="cannot be used: it has tekken.json alone"):
        read_tokenizer("--model", str(chat_folder))


def test_what_came_with_a_model_is_saved_with_it_byte_by_byte(chat_folder, tmp_path):
    """Also a generation_config that transformers does not write, and what is a link."""
    unwritable = dict(min_p=0.1, do_sample=False, use_cache=False, cache_implementation="hybrid")
    fields("generation_config.json", **unwritable)(chat_folder)
    fields("tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")(chat_folder)
    (chat_folder / "additional_chat_templates").mkdir()
    (chat_folder / "additional_chat_templates" / "tool.jinja").write_text("{{ messages }}")
    (chat_folder / "tokenizer.json").rename(tmp_path / "blob")
    (chat_folder / "tokenizer.json").symlink_to(tmp_path / "blob")
    fetch_weights("--model", str(chat_folder), is_policy=True)
    made = load_model("--model", str(chat_folder))
    save_model(made, made.state_dict(), str(chat_folder), tmp_path / "saved")
    before, after = (
        {str(file.relative_to(of)): file.read_bytes() for file in of.rglob("*") if file.is_file()}
        for of in (chat_folder, tmp_path / "saved")
    )
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"config.json", SAFE}
    assert not any(file.is_symlink() for file in (tmp_path / "saved").iterdir())


def test_what_could_not_be_saved_at_the_end_is_refused_at_the_start(untied_model, monkeypatch):
    writes = "transformers.PreTrainedConfig.save_pretrained"
    monkeypatch.setattr(writes, lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match="saved again: division by zero"):
        fetch_weights("--model", str(untied_model), is_policy=True)


def test_a_token_beyond_the_embedding_is_refused_where_a_prompt_may_have_it(chat_folder):
    file, chat = chat_folder / "tokenizer.json", [{"role": "user", "content": "1+1?"}]
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    image = dict(id=257, content="<|image|>", special=True, **flags)
    file.write_text(json.dumps(content | {"added_tokens": [*content["added_tokens"], image]}))
    config = Config(model=str(chat_folder))
    assert check_tokenizer(config, ["2", chat, "3"])[1] == "2"
    for prompts in (["2", "<|image|>"], [chat, [{"role": "user", "content": "a <|image|>"}]]):
        with pytest.raises(UserError, match=r"knows 257 tokens, .*'<\|image\|>' is .* token 257"):
            check_tokenizer(config, prompts)
    (chat_folder / "chat_template.jinja").write_text("<|image|>" + CHAT_TEMPLATE)
    with pytest.raises(UserError, match="none of them but token 257"):
        check_tokenizer(config, [chat])
