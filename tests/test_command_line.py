"""Bad input ends in one line on stderr and exit code 2, before a model is loaded."""

import dataclasses
import json
import os
import re
import shutil
import subprocess

import pytest
from conftest import ROOT, flags, python, tba
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Config
from launch.command_line import build_config, find_presets
from tasks import task_names
from tba import main

OWN = """
from dataclasses import dataclass
from tasks import Query, Task

class T(Task):
    def queries(self, split): return []
    def score(self, *a): return []
"""


def asking(*queries: str) -> str:
    """The source of a task with these queries: id, prompt and answer each."""
    return OWN.replace("[]", f"[{', '.join(f'Query({query}, None)' for query in queries)}]", 1)


def own(*settings: str, decorator: str = "@dataclass", source: str = OWN) -> str:
    """The source of a task with these settings."""
    header = "\n    ".join([f"{decorator}\nclass T(Task):", *settings])
    return source.replace("class T(Task):", header)


def refused(arguments: list, expected: str, capfd) -> None:
    """Run main() in this process: a new one takes seconds for its imports. …: any words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", None)  # no model is loaded
        assert main([str(argument) for argument in arguments]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert re.search(".*".join(map(re.escape, expected.split("…"))), err), err
    assert out == "", "nothing had begun"


@pytest.fixture(scope="module")
def files(tmp_path_factory, gsm8k_data, untied_model, chat_model):
    """Make files that a command line can name: what is refused changes none of them."""
    tmp_path, chat = tmp_path_factory.mktemp("files"), "[dict(role='{}', content='Hi')]"
    row = json.dumps({"query": "q", "reference_response": "r", "query_reference_response": "qr"})
    for name, text in {
        "used/config.json": '{"task": "arithmetic"}',
        "broken/config.json": "{",
        "empty_model/README.md": "",
        "a_file": "",
        "empty.json": "{}",
        "saved.json": '{"task": "arithmetic", "steps": 5}',
        "other.json": '{"task": "arithmetic", "paces": 5}',
        "option.json": '{"task": "arithmetic", "options": {"colour": 1}}',
        "half.json": '{"task": "gsm8k", "steps": 10.5}',
        "true.json": '{"task": "gsm8k", "steps": true}',
        "text.json": '{"task": "gsm8k", "searchers": "2"}',
        "number.json": '{"task": "gsm8k", "options": {"data_dir": 7}}',
        "refused.py": asking(f"0, {chat.format('user')}", f"1, {chat.format('system')}"),
        "clash.py": own("seed: int = 0"),
        "secret.py": own("max_tokens: int = 3", "keyboard: str = ''", "api_key: str | None = None"),
        "secrets.py": own("key_ids: list[int] | None = None", "credentials: tuple[str, ...] = ()"),
        "bad_row/train.jsonl": '{"query": "q"}',
        "tldr/train.jsonl": row,
        "tldr/test.jsonl": row,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copytree(untied_model, tmp_path / "no_end")
    tokenizer = AutoTokenizer.from_pretrained(untied_model, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "no_end")
    model = untied_model
    return {
        **{"tmp": tmp_path, "model": model, "chat": chat_model},
        "gsm8k": f"gsm8k --data_dir {gsm8k_data}",
        "tldr": f"tldr --data_dir {tmp_path}/tldr --model {model} --gold_model {model}",
        "redteam": f"redteam --model {model} --victim_model {model} --classifier {model} "
        f"--embedding_model {model} --max_prompt_tokens 230",
        "plan": f"--model {model} --plan --plan_gpus",
    }


# Values that a setting does not take, as the message shows them, and what it says of them.
BOUNDS = {
    "steps=0 beta=0.0 beta=nan evaluation_samples=0 trainer_processes=0": "it must be positive",
    "search_ahead=0": "it must be positive",
    "eval_every=-1 constant_staleness=-1 max_staleness=-1": "it must not be negative",
    "responses_per_query=1 samples_per_query=0": "it must be at least 2",
    "most_on_policy_prob=1.01 most_on_policy_prob=nan": "it is a probability",
    "beta_stop_step=-5.0 beta_steps=1.5": "it is a number of steps, or a share of --steps",
    "gpu_memory_utilization=1.5": "it is a share, between 0 and 1",
    "adam_beta2=1.0": "it lies between 0 and 1",
    "temperature=2.5": "vLLM samples at 0.01 to 2",
    "evaluation_temperature=2.5": "vLLM samples at 0 or",
    "lr_schedule='cosine'": "it is one of constant, linear, warmup_stable_decay",
    "plan_gpus='4' plan_gpus='0x80' plan_gpus='4x80GB'": "it is a number of GPUs and the GiB of",
}
OUT_OF_BOUNDS = [
    ("--" + value.replace("'", ""), f"--{value.replace('=', ' is ')}: {words}")
    for values, words in BOUNDS.items()
    for value in values.split()
]
BAD_INPUT = [
    *OUT_OF_BOUNDS,
    ("{tmp}/clash.py --help", "has a setting 'seed', which is one of every run"),
    ("{tmp}/secrets.py", "has a setting 'credentials', …read a secret from the environ"),
    ("{tmp}/secret.py --api_key sk-1", "has a setting 'api_key', …read a secret from the environ"),
    ("--step 10", "unknown argument --step: did you mean --steps or "),
    ("arithmetic --api_key=sk-1", "unknown argument --api_key: python tba.py arithmetic --help"),
    ("arithmetic gsm8k", "unknown argument gsm8k: python tba.py"),
    ("arithmetic --data_dir x", "unknown argument --data_dir: "),  # of another task
    ("tldr --reward_modell x/y", "unknown argument --reward_modell: did you mean --reward_model "),
    ("multiplication", "'multiplication': the tasks are arithmetic, …give the path of a .py file"),
    ("{tmp}/absent.py", "task file…absent.py' does not exist"),
    ("arithmetic --loss {tmp}/absent.py", "objective file…absent.py' does not exist"),
    ("{gsm8k} --model {tmp}/absent", "absent' does not exist: give a local directory or a hub id"),
    ("{gsm8k} --model a/b/c", "--model 'a/b/c' does not exist"),
    ("{gsm8k} --model {tmp}/empty_model", "holds no model: it has no config.json"),
    ("gsm8k --data_dir {tmp}", "train.jsonl does not exist"),
    ("{gsm8k} --model {model} --max_prompt_tokens 1000", "more than the 1024 positions"),
    ("--samples_per_query 4", "--responses_per_query is 8, more than --samples_per_query 4"),
    ("--samples_per_query 101", "--samples_per_query is 101, more than --capacity_per_query 100"),
    ("--beta_final 0.1", "--beta_final is 0.1 but nothing says when"),
    ("--evaluation_samples 4", "--evaluation_samples is 4, but responses to test queries are"),
    (
        "{tmp}/refused.py --model {chat}",
        "the chat template of --model '{chat}', on a prompt of the task, fails: ",
    ),
    ("--model {tmp}/no_end", "knows 257 tokens, and its tokenizer's '<end>' is none of them"),
    ("--config {tmp}/absent.json", "holds no settings of a run: absent.json: No such file"),
    ("--config {tmp}/other.json", "other.json' holds …: this version has no setting 'paces'"),
    ("--config {tmp}/empty.json", "holds no settings of a run: empty.json: it names no task"),
    ("--config {tmp}/option.json", "task 'arithmetic' has no setting 'colour'"),
    ("--config {tmp}/half.json", "error: --steps is 10.5: its type is int\n"),
    ("--config {tmp}/true.json", "error: --steps is True: its type is int\n"),
    ("--config {tmp}/text.json", "error: --searchers is '2': its type is int or NoneType\n"),
    ("--config {tmp}/number.json", "error: --data_dir is 7: its type is str\n"),
    ("gsm8k --config {tmp}/saved.json", "task is 'gsm8k', but the settings are for 'arithmetic'"),
    ("--config {tmp}/saved.json gsm8k", "are for 'arithmetic': give a --config of that task"),
    ("--steps 3 gsm8k", "the settings are for 'arithmetic': TASK comes first"),
    ("tldr --config {tmp}/saved.json --tiny", "--config and --tiny are both given"),
    ("--config {tmp}/saved.json --resume {tmp}", "--resume and --config are both given"),
    ("--lr_schedule warmup_stable_decay", "needs --decay_steps"),
    ("gsm8k --lr_schedule linear", "--decay_steps is 600: with … would be 0 from step 650 on"),
    ("--synchronous --constant_staleness 2", "--synchronous and --constant_staleness are both"),
    ("gsm8k --preset k4", "--preset is 'k4': it is one of figure1, table2, k40, as_released"),
    ("--plan_gpus 4x80", "--plan_gpus is '4x80', which does nothing without --plan: give"),
    ("{plan} 4x80 --searchers 4", "is 4, but there are 4 GPUs: room for 3 beside the trainer"),
    ("--master_dtype bfloat16", "needs --dtype bfloat16, and that is auto"),
    ("--searchers 0", "--searchers is 0: that is for --ray, where other nodes search"),
    ("--plan --model {tmp}/absent", "absent' does not exist…; a directory with its config.json"),
    ("--eval_only --model {tmp}/absent", "absent' does not exist"),
    ("tldr --preset 1b --tiny", "--preset and --tiny are both given: give one of the two"),
    ("{tldr} --reward_model {model} --reference_model {tmp}/absent", "--reference_model"),
    ("{tldr} --reward_model {model} --reference_model {model}", "has 2 labels: it must have 1"),
    ("{redteam} --lora_rank 0 --lora_alpha None --toxic_label bad", "label 'bad'…LABEL_0, LABEL_1"),
    ("--reward_temperature 2", "is 2.0, which does nothing without --reward_temperature_steps: "),
    ("jsonl --preset k40", "--preset is 'k40': this task has none"),
    ("--resume {tmp}/absent", "absent' holds no run that can be resumed: config.json: No such"),
    ("--resume {tmp}/empty_model", "holds no run that can be resumed: config.json: No such"),
    ("--resume {tmp}/a_file", "config.json: Not a directory; give the directory of one"),
    ("--resume {tmp}/broken", "holds no run that can be resumed: config.json: Expecting prop"),
    ("--resume {tmp}/used", "used' has no checkpoint"),
    ("--output_dir {tmp}/used", "already holds a run"),
    ("--output_dir {tmp}/a_file/run", "cannot be written"),
    ("--report {tmp}/absent", "absent' is no run's directory: it has no config.json of one"),
    ("--report {tmp}/used", "is no run's directory"),
    ("--report {tmp} --plan", "--report and --plan are both given: give one of the two"),
    ("tldr --data_dir {tmp}/bad_row", "train.jsonl line 1…has no 'reference_response'"),
]


@pytest.mark.parametrize("arguments, expected", BAD_INPUT)
def test_bad_input_ends_in_one_line_and_exit_code_2(arguments, expected, files, capfd):
    expected = expected.replace("{chat}", str(files["chat"]))
    refused(arguments.format(**files).split(), expected, capfd)


IDS = "its id must be an int of 64 bits that no other has"
SAMPLING = "    def sampling(self, rng): return {'n': 2}"
BAD_TASKS = [
    ("1 / 0", "importing task file '{file}' fails: ZeroDivisionError: division by zero ({file}"),
    ("exit()", "importing task file '{file}' fails: SystemExit"),
    (OWN.replace("def score", "def grade"), "has no method score or is_right or extract"),
    (OWN, "has no train queries"),
    (OWN.replace("return []", "return [].split"), "its train queries fails: AttributeError"),
    (OWN + "PRESETS = {'a': dict(paces=3)}", "preset 'a' of task '{file}'"),
    (asking("0, 7"), "train query 0: its prompt is 7: it must be a string, or a list of"),
    (asking("__import__('numpy').int64(3), 'Hi'"), f"train query np.int64(3): {IDS}"),
    (asking("True, 'Hi'"), f"train query True: {IDS}"),
    (asking(f"{2**63}, 'Hi'"), f"train query {2**63}: {IDS}"),
    (asking("1, 'Hi'", "1, 'Ho'"), f"train query 1: {IDS}"),
    (asking("0, 'Hi'") + SAMPLING, "fails: ValueError: --samples_per_query is for 'n'"),
]
WEIGHT = "import torch\n_w = torch.ones((), requires_grad=True)\n"
BAD_OBJECTIVES = [
    ("1 / 0", "importing objective file '{file}' fails: ZeroDivisionError: division by zero"),
    ("def _helper(x): pass", "defines 0 functions: it must define one"),
    ("def one(x): pass\ndef two(x): pass", "defines 2 functions: it must define one"),
    ("def own(x): return x.lengths.sum(), {}", "fails: AttributeError"),
    (
        "def own(x): return x.logprobs.sum()",
        ", which must return a loss and a dict of metrics, fails",
    ),
    ("def own(x): return x.logprobs, {}", "its loss must be one finite number; of an example"),
    ("def own(x): return x.logprobs.sum() / 0, {}", "one finite number; of an example it is"),
    ("def own(x): return 1.0, {}", "has no gradient with respect to logprobs"),
    ("def own(x): return None, {}", "fails: RuntimeError"),
    ("def own(x): return x.logprobs.sum(), {'note': 'x'}", "fails: TypeError"),
    ("def own(x): return x.logprobs.sum(), {'log_z': x.rewards}", "'log_z' must be one number"),
    ("def own(x): return x.logprobs.sum(), {'step': 1}", "a name that is none of step, loss,"),
    (WEIGHT + "def own(x): return _w * x.beta, {}", "has no gradient with respect to logprobs"),
]
BAD_FILES = [
    *(("{file}", *task) for task in BAD_TASKS),
    *(("arithmetic --loss {file}", *objective) for objective in BAD_OBJECTIVES),
]


@pytest.mark.parametrize("arguments, source, expected", BAD_FILES)
def test_a_task_or_objective_of_no_use_is_refused(arguments, source, expected, tmp_path, capfd):
    file = tmp_path / "own.py"
    file.write_text(source)
    refused(arguments.format(file=file).split(), expected.replace("{file}", str(file)), capfd)


def test_an_integer_is_a_number_and_a_setting_of_no_plain_type_is_left_alone(tmp_path):
    task, file = tmp_path / "own.py", tmp_path / "config.json"
    task.write_text(own("names: list[str]"))
    settings = {"task": str(task), "beta": 1, "options": {"names": ["a", "b"]}}
    file.write_text(json.dumps(settings))
    config = build_config(flags(config=file))
    assert (config.beta, config.options) == (1, settings["options"])


def test_an_error_reaches_the_shell():
    result = tba("--steps", 0, code=2)
    assert (result.stdout, result.stderr) == ("", "error: --steps is 0: it must be positive\n")


def test_the_set_up_says_in_one_line_what_it_installs(tmp_path):
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements" / "cpu.txt").touch()
    stub = tmp_path / "stub"  # of Python: its venv has itself as Python and as uv
    venv = '[ "$2" = venv ] && mkdir -p $3/bin && cp $0 $3/bin/python && cp $0 $3/bin/uv'
    install = '[ "$2" = install ] && echo "$UV_FIND_LINKS $*" > uv.txt'
    stub.write_text(f"#!/bin/sh\n{venv}\n{install}\nexit 0")
    stub.chmod(0o755)
    command = f"make --no-print-directory -f {ROOT}/Makefile setup PYTHON={stub} GPU=".split()
    environment = os.environ | {"PIP_FIND_LINKS": "some/wheels"}
    made = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    line = "installing what requirements/cpu.txt asks for into .venv\n"
    assert (made.returncode, made.stdout, made.stderr) == (0, line, "")
    asked = (tmp_path / "uv.txt").read_text()
    assert asked.startswith("some/wheels pip install --quiet "), "stderr is no terminal"


def test_a_start_on_another_kind_of_processor_says_that_it_was_never_tried(monkeypatch, capfd):
    for machine, warns in (("aarch64", True), ("x86_64", False), ("AMD64", False)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert main(["arithmetic", "--model", "/absent"]) == 2
        expected = f"warning: never tried on {machine}, only on x86-64\n"
        assert (expected in capfd.readouterr().err) == warns


def test_nothing_optional_and_for_the_command_line_nothing_slow_is_imported():
    """Keep torch out of tba.py: spawned children import it before their target sets anything."""
    slow, optional = {"torch", "vllm", "transformers"}, {"ray", "wandb", "tensorboard"}
    for modules, absent in ("launch.launcher, trainer", optional), ("tba, config", slow):
        python("-c", f"import sys, {modules}; assert not {absent} & set(sys.modules)")


def test_a_value_of_another_type_is_refused_with_what_the_flag_is_for(capfd):
    assert main(["--steps", "many"]) == 2
    out, err = capfd.readouterr()
    assert "Error parsing --steps" in err and "Optimizer steps" in err and out == ""


def test_without_arguments_the_tasks_and_how_to_begin_are_shown(capfd):
    assert main([]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("usage: python tba.py TASK") and out == "", "nothing had begun"
    assert re.findall(r"^  (\w+) +[A-Z]", err, re.MULTILINE) == task_names()
    assert max(map(len, err.splitlines())) <= 100
    commands = re.findall(r"^  python tba.py ([^#\n]+)", err, re.MULTILINE)
    tasks = [build_config(command.split()).task for command in commands]
    assert tasks == ["arithmetic", "gsm8k", "jsonl"], "the commands are right"


def test_a_new_run_may_have_the_settings_of_an_earlier_one_and_flags_over_them(tmp_path):
    first = build_config(["gsm8k", *flags(preset="k40", beta=0.5, data_dir="x")])
    first = dataclasses.replace(first, output_dir="runs/first", model="some/model")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dataclasses.asdict(first)))
    again = build_config(flags(config=file, steps=3))
    assert again == dataclasses.replace(first, steps=3, output_dir="", config=str(file))
    over = build_config(["gsm8k", *flags(config=file, data_dir="y", sync_period=3)])
    assert (over.options, over.sync_period) == ({"data_dir": "y"}, 3)


def test_flags_lie_over_the_preset_that_over_the_defaults_and_nothing_changes_later(tmp_path):
    config, preset = build_config(["gsm8k", *flags(steps=3, beta=0.5)]), build_config(["gsm8k"])
    assert config == dataclasses.replace(preset, steps=3, beta=0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 4
    assert preset == Config(**find_presets("gsm8k")["figure1"], task="gsm8k", preset="figure1")
    task = tmp_path / "some_task.py"
    task.write_text(OWN + "PRESETS = {'short': dict(steps=7)}\n")
    assert build_config([str(task)]).steps == 7, "its presets stand in it"


def test_a_tasks_own_settings_are_flags_and_lie_over_its_preset():
    config = build_config(["tldr", *flags(reward_model="some/model", steps=3)])
    options = find_presets("tldr")["410m"]["options"] | {"reward_model": "some/model"}
    assert len(options) > 1 and (config.options, config.steps) == (options, 3)
    tiny = build_config(["redteam", "--tiny"])
    assert tiny.preset == "tiny" and tiny == build_config(["redteam", "--preset", "tiny"])
    assert build_config(["gsm8k", "--data_dir", "x"]).options == {"data_dir": "x"}


@pytest.mark.parametrize("decorator", ["@dataclass", "@dataclass(frozen=True)"])
def test_a_tasks_settings_may_have_no_default_and_be_frozen(decorator, tmp_path, recwarn, capsys):
    settings = (
        "# Colors",
        "shade: int",
        '"""How dark."""',
        "max_tokens: int = 0",
        "keyboard: str = ''",
    )
    (tmp_path / "own.py").write_text(own(*settings, decorator=decorator))
    task = str(tmp_path / "own.py")
    assert build_config([task, "--shade", "3"]).options == {"shade": 3}
    assert not recwarn.list
    assert main([task, "--help"]) == 0 and "--shade" in capsys.readouterr().out
    assert main([task]) == 2, "tyro asks for it"


def test_help_names_every_setting_with_its_meaning(capsys):
    assert main(["--help"]) == 0
    out, _ = capsys.readouterr()
    hidden = "task", "options", "data_digest", "kv_cache_bytes", "base_model"
    for name in Config.__dataclass_fields__:
        assert name in hidden or re.search(rf"--{name}[ ,]", out), name
    text = re.sub(r"[│\s]+", " ", out)  # out of tyro's box
    assert "log Z of a query is estimated from them." in text
