"""Bad input ends in one line on stderr and exit code 2, before a model is loaded."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, read, tba
from transformers import AutoTokenizer

from config import Config, UserError
from runtime import launch
from runtime.command_line import build_config
from runtime.display import html_report
from tba import main

CHAT = "[Query(0, [{'role': 'user', 'content': 'Hi'}], None)]"
OWN = """
from dataclasses import dataclass
from tasks import Query, Task

class T(Task):
    def queries(self, split): return []
    def score(self, *a): return []
"""

SECRETIVE = """
from dataclasses import dataclass
from tasks.arithmetic import Arithmetic

@dataclass
class T(Arithmetic):
    api_key: str = ""
    max_tokens: int = 3
"""


@pytest.fixture
def files(tmp_path, gsm8k_data, untied_model, chat_model):
    """Make files that a command line can name."""
    row = json.dumps({"question": "1+1?", "answer": "#### 2"})
    texts = {"query": "q", "reference_response": "r", "query_reference_response": "qr"}
    summary = json.dumps(texts)
    for name, lines in {
        "no_answer": [row, row, '{"question": "1+1?"}'],
        "no_question": ['{"answer": "#### 2"}'],
        "no_gold": [row, '{"question": "1+1?", "answer": "two"}'],
        "broken": [row, "{"],
        "tldr": [summary, '{"query": "q"}'],
        "good_tldr": [summary],
        "no_box": ['{"problem": "1+1?", "solution": "2"}'],
    }.items():
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            (tmp_path / name / f"{split}.jsonl").write_text("\n".join(lines))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "config.json").write_text("{}")
    (tmp_path / "empty_model").mkdir()
    (tmp_path / "a_file").write_text("")
    settings = {"saved": {"steps": 5}, "other": {"paces": 5}, "words": {"steps": "many"}}
    for name, own in (settings | {"option": {"options": {"colour": 1}}}).items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"task": "arithmetic"} | own))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "preset.py").write_text(OWN + "PRESETS = {'a': dict(paces=3)}\n")
    (tmp_path / "raises.py").write_text("1 / 0")
    (tmp_path / "no_score.py").write_text(OWN.replace("def score", "def grade"))
    (tmp_path / "no_queries.py").write_text(OWN)
    (tmp_path / "no_chat.py").write_text(OWN.replace("[]", "[Query(0, 7, None)]", 1))
    (tmp_path / "chat.py").write_text(OWN.replace("[]", CHAT, 1))
    both = CHAT[:-1] + ", " + CHAT[1:].replace("user", "system").replace("Query(0", "Query(1")
    (tmp_path / "refused.py").write_text(OWN.replace("[]", both, 1))
    ids = {"text": "'a'", "numpy": "__import__('numpy').int64(3)", "true": True, "big": 2**63}
    for name, first in (ids | {"same": 1}).items():
        two = f"[Query({first}, 'Hi', None), Query(1, 'Ho', None)]"
        (tmp_path / f"{name}_id.py").write_text(OWN.replace("[]", two, 1))
    draws = OWN.replace("[]", "[Query(0, 'Hi', None)]", 1)
    (tmp_path / "draws.py").write_text(draws + "    def sampling(self, rng): return {'n': 2}\n")
    shutil.copytree(untied_model, tmp_path / "no_end")
    tokenizer = AutoTokenizer.from_pretrained(untied_model, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path / "no_end")
    model = untied_model
    commands = {
        "gsm8k": f"gsm8k --data_dir {gsm8k_data}",
        "tldr": f"tldr --data_dir {tmp_path / 'good_tldr'} --model {model}",
        "redteam": f"redteam --model {model} --victim_model {model} --classifier {model}",
        "plan": f"--model {model} --plan --plan_gpus",
    }
    return commands | {"tmp": tmp_path, "model": model, "chat": chat_model}


TASKS = "addends, arithmetic, competition_math, gsm8k, jsonl, reach, reasoning_gym, redteam, tldr"
BAD_INPUT = [
    ("multiplication", f"'multiplication': the tasks are {TASKS}, or give the path of a .py file"),
    ("{tmp}/absent.py", "absent.py' does not exist"),
    ("{tmp}/raises.py", "fails to import: ZeroDivisionError: division by zero"),
    ("{tmp}/no_score.py", "has no method score"),
    ("{gsm8k} --model {tmp}/absent", "absent' does not exist: give a local directory or a hub id"),
    ("{gsm8k} --model a/b/c", "--model 'a/b/c' does not exist"),
    ("{gsm8k} --model {tmp}/empty_model", "holds no model: it has no config.json"),
    ("gsm8k --data_dir {tmp}", "train.jsonl does not exist"),
    ("gsm8k --data_dir {tmp}/no_answer", "train.jsonl line 3 has no 'answer'"),
    ("gsm8k --data_dir {tmp}/no_question", "train.jsonl line 1 has no 'question'"),
    ("gsm8k --data_dir {tmp}/no_gold", "jsonl line 2: the answer has no number behind '####'"),
    ("gsm8k --data_dir {tmp}/broken", "train.jsonl line 2 is not JSON"),
    ("{gsm8k} --model {model} --max_prompt_tokens 1000", "more than the 1024 positions"),
    ("--samples_per_query 4", "--responses_per_query is 8, more than --samples_per_query 4"),
    ("--responses_per_query 1", "--responses_per_query is 1: it must be at least 2"),
    ("--samples_per_query 0", "--samples_per_query is 0: it must be at least 2"),
    ("--samples_per_query 101", "--capacity_per_query is 100, less than --samples_per_query 101"),
    ("--most_on_policy_prob 1.01", "--most_on_policy_prob is 1.01: it is a probability"),
    ("--most_on_policy_prob nan", "--most_on_policy_prob is nan: it is a probability"),
    ("--beta 0", "--beta is 0.0: it must be positive"),
    ("--beta=-1", "--beta is -1.0: it must be positive"),
    ("--beta nan", "--beta is nan: it must be positive"),
    ("--beta_final 0.1", "--beta_final is 0.1 but nothing says when"),
    ("--beta_stop_step -5", "--beta_stop_step is -5.0: it is a number of steps"),
    ("--beta_steps 1.5", "--beta_steps is 1.5: it is a number of steps, or a share of --steps"),
    ("--evaluation_samples 0", "--evaluation_samples is 0: it must be positive"),
    ("--evaluation_samples 4", "--evaluation_samples is 4, but responses to test queries are"),
    ("--evaluation_temperature 2.5", "--evaluation_temperature is 2.5: vLLM samples at 0 or"),
    ("{tmp}/chat.py --model {model}", "has no chat template: use a model that has one"),
    ("{tmp}/refused.py --model {chat}", "the chat template of --model '{chat}' does not take"),
    ("{tmp}/no_chat.py", "train query 0: its prompt is 7: it must be a string, or a list of"),
    ("{tmp}/text_id.py", "train query 'a': its id must be an int of 64 bits that no other has"),
    ("{tmp}/numpy_id.py", "train query np.int64(3): its id must be an int"),
    ("{tmp}/true_id.py", "train query True: its id must be an int"),
    ("{tmp}/big_id.py", "train query 9223372036854775808: its id must be an int of 64 bits"),
    ("{tmp}/same_id.py", "train query 1: its id must be an int of 64 bits that no other has"),
    ("{tmp}/draws.py", "its sampling() gives 'n', which --samples_per_query is for"),
    ("--model {tmp}/no_end", "knows 257 tokens, and its tokenizer's end of sequence '<end>' is"),
    ("--buffer_growth_steps -1", "--buffer_growth_steps is -1: it must not be negative"),
    ("--config {tmp}/absent.json", "absent.json' holds no settings of a run: FileNotFound"),
    ("--config {tmp}/a_file", "a_file' holds no settings of a run: JSONDecodeError"),
    ("--config {tmp}/other.json", "other.json' holds no settings of a run: TypeError"),
    ("gsm8k --config {tmp}/saved.json", "task is 'gsm8k', but the settings are for 'arithmetic'"),
    ("--config {tmp}/saved.json gsm8k", "task is 'gsm8k', but the settings are for 'arithmetic'"),
    ("--config {tmp}/saved.json --preset demo", "--preset and --config are both given"),
    ("tldr --config {tmp}/saved.json --tiny", "--tiny and --config are both given"),
    ("--config {tmp}/list.json", "list.json' holds no settings of a run: ValueError"),
    ("--config {tmp}/empty.json", "empty.json' holds no settings of a run: ValueError"),
    ("--config {tmp}/words.json", "--steps is 'many': its type is int"),
    ("--config {tmp}/option.json", "task 'arithmetic' has no setting 'colour'"),
    ("{tmp}/preset.py", "preset 'a' of task '{tmp}/preset.py'"),
    ("--config {tmp}/saved.json --resume {tmp}", "--resume and --config are both given"),
    ("--steps 0", "--steps is 0: it must be positive"),
    ("--steps -5", "--steps is -5: it must be positive"),
    ("--eval_every -1", "--eval_every is -1: it must not be negative"),
    ("--temperature 2.5", "--temperature is 2.5: vLLM samples at 0.01 to 2"),
    ("{tmp}/no_queries.py", "has no train queries"),
    ("--lr_schedule cosine", "is 'cosine': it is one of constant, linear, warmup_stable_decay"),
    ("--lr_schedule warmup_stable_decay", "needs --decay_steps"),
    ("gsm8k --lr_schedule linear", "--decay_steps is 600: with … would be 0 from step 650 on"),
    ("--loss ppo", "--loss is 'ppo': it is one of tb"),
    ("--synchronous --searchers 64", "--searchers is 64, more than --queries_per_batch"),
    ("--synchronous --constant_staleness 2", "staleness is 2, but --synchronous makes it 0"),
    ("--constant_staleness -1", "--constant_staleness is -1: it must not be negative"),
    ("--max_staleness -1", "--max_staleness is -1: it must not be negative"),
    ("--max_staleness 5 --constant_staleness 5", "--max_staleness 5 is for the buffer"),
    ("--reference_reset_period 5 --sync_period 2", "period is 5, no multiple of --sync_period 2"),
    ("gsm8k --preset k4", "--preset is 'k4': it is one of figure1, table2, k40, as_released"),
    ("--plan --plan_gpus 4", "--plan_gpus is '4': it is a number of GPUs and the GiB of each"),
    ("--plan --plan_gpus 0x80", "--plan_gpus is '0x80'"),
    ("--plan --plan_gpus 4x80GB", "--plan_gpus is '4x80GB'"),
    ("--plan_gpus 4x80", "--plan_gpus 4x80 is for --plan"),
    ("{plan} 4x80 --searchers 4", "is 4, but there are 4 GPUs: room for 3 beside the trainer"),
    ("{plan} 4x80 --trainer_processes 4", "is 4, … 4 GPUs: … a searcher another; give at most 3"),
    ("{plan} 8x80 --trainer_processes 4 --searchers 5", "is 5, … 8 GPUs: room for 4 beside 4"),
    ("--trainer_processes 33", "--trainer_processes is 33, more than --queries_per_batch 32"),
    ("--trainer_processes 2 --lora_rank 8", "--lora_rank 8 … 2 are both given, … are not sharded"),
    ("--searchers 0", "--searchers is 0: that is for --ray, where other nodes search"),
    ("--searchers_per_node 2", "--searchers_per_node 2 is for --ray"),
    ("--ray auto --synchronous", "--ray auto is for free-running search"),
    ("--trainer_processes 0", "--trainer_processes is 0: it must be positive"),
    ("--plan --model {tmp}/absent", "absent' does not exist"),
    ("tldr --preset 1b --tiny", "--preset is '1b', but --tiny is a preset of its own"),
    ("--eval_only --model {tmp}/absent", "absent' does not exist"),
    ("tldr --data_dir {tmp} --model {model}", "train.jsonl does not exist"),
    ("tldr --data_dir {tmp}/tldr --model {model}", "jsonl line 2 has no 'reference_response'"),
    ("{tldr} --reference_model {tmp}/absent", "--reference_model"),
    ("{tldr} --reference_model {model} --reward_model {model}", "has 2 labels: it must have 1"),
    ("{redteam} --toxic_label bad", "has no label 'bad': it has LABEL_0, LABEL_1"),
    ("competition_math --data_dir {tmp}/no_box --model {model}", "line 1: … has no \\boxed{}"),
    ("--reward_temperature 2", "--reward_temperature is 2.0 but nothing says how long"),
    ("--reference_temperature 1.2", "--reference_temperature is 1.2 but nothing says when"),
    ("--adam_beta2 1", "--adam_beta2 is 1.0: it lies between 0 and 1"),
    ("{tmp}/no_score.py --preset k40", "--preset is 'k40': this task has none"),
    ("--resume {tmp}/absent", "absent' holds no run that can be resumed"),
    ("--resume {tmp}/used", "used' has no checkpoint"),
    ("--gpu_memory_utilization 1.5", "it is a share, between 0 and 1"),
    ("--output_dir {tmp}/used", "already holds a run"),
    ("--output_dir {tmp}/a_file/run", "cannot be written"),
    ("--output_dir /proc/run", "cannot be written"),
]


@pytest.mark.parametrize("arguments, expected", BAD_INPUT)
def test_bad_input_ends_in_one_line_and_exit_code_2(arguments, expected, files, capfd):
    """Run main() in this process: a new one takes seconds for its imports. …: any words."""
    assert main(arguments.format(**files).split()) == 2
    out, err = capfd.readouterr()
    assert err.startswith("error: ") and err.count("\n") == 1, err
    for name in ("tmp", "chat"):
        expected = expected.replace(f"{{{name}}}", str(files[name]))
    assert re.search(".*".join(map(re.escape, expected.split("…"))), err), err
    assert out == "", "nothing had begun"


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({"steps": 10.5}, "--steps is 10.5: its type is int"),
        ({"steps": True}, "--steps is True: its type is int"),
        ({"seed": None}, "--seed is None: its type is int"),
        ({"model": 7}, "--model is 7: its type is str"),
        ({"searchers": "2"}, "--searchers is '2': its type is int or NoneType"),
        ({"task": 7}, "--task is 7: its type is str"),
        ({"options": {"data_dir": 7}}, "--data_dir is 7: its type is str"),
    ],
)
def test_a_setting_of_another_type_in_a_config_json_is_refused(settings, expected, tmp_path, capfd):
    (tmp_path / "config.json").write_text(json.dumps({"task": "gsm8k", **settings}))
    assert main(["--resume", str(tmp_path)]) == 2
    assert capfd.readouterr() == ("", f"error: {expected}\n")


def own_task(directory, *settings: str, decorator: str = "@dataclass") -> str:
    """Write a task that has these settings. Returns the path of its file."""
    header = "\n    ".join([f"{decorator}\nclass T(Task):", *settings])
    (directory / "own.py").write_text(OWN.replace("class T(Task):", header))
    return str(directory / "own.py")


def test_an_integer_is_a_number_and_a_setting_of_no_plain_type_is_left_alone(tmp_path):
    own = own_task(tmp_path, "names: list[str]")
    settings = {"task": own, "beta": 1, "options": {"names": ["a", "b"]}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = build_config(["--config", str(tmp_path / "config.json")])
    assert (config.beta, config.options) == (1, {"names": ["a", "b"]})


@pytest.mark.parametrize("flag", ["--api_key {}", "--api-key={}"])
def test_a_tasks_secret_is_in_no_file_and_a_resumed_run_needs_it_anew(
    flag, tmp_path, untied_model, monkeypatch, capfd
):
    (tmp_path / "own.py").write_text(SECRETIVE)
    run_dir, secret = tmp_path / "run", "sk-\n0123"
    arguments = [str(tmp_path / "own.py"), "--model", str(untied_model), "--max_tokens", "5"]
    arguments += [part.format(secret) for part in flag.split()] + ["--output_dir", str(run_dir)]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "orig_argv", arguments)
    monkeypatch.setattr(launch, "Run", lambda *_: None)  # up to the start of the processes
    monkeypatch.setattr(launch, "supervise", lambda *_: html_report.write(str(run_dir)))
    main(arguments)
    written = [path.read_text() for path in run_dir.rglob("*") if path.is_file()]
    assert len(written) == 3 and not any("0123" in text for text in written)
    assert "0123" not in capfd.readouterr().out
    assert "--max_tokens 5" in read(run_dir, "starts.jsonl")[0]["command"]
    for earlier in ["--resume", str(run_dir)], ["--config", str(run_dir / "config.json")]:
        assert main(earlier) == 2
        expected = "error: --api_key is not written down: give it, or set API_KEY\n"
        assert capfd.readouterr() == ("", expected)
        given = build_config([*earlier, "--api_key", "new"])
        assert given.options == {"api_key": "new", "max_tokens": 5}
        with monkeypatch.context() as patch:
            patch.setenv("API_KEY", secret)
            assert build_config(earlier).options["api_key"] == secret


def test_without_ray_its_flag_says_what_to_install(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "runtime.nodes.joining", raising=False)
    assert main(["arithmetic", "--ray", "auto"]) == 2
    _, err = capfd.readouterr()
    assert err.startswith("error: --ray needs Ray") and err.count("\n") == 1
    assert "pip install -r requirements-ray.txt" in err


@pytest.mark.parametrize("machine, lines", [("aarch64", 1), ("x86_64", 0), ("AMD64", 0)])
def test_a_start_on_another_kind_of_processor_says_that_it_was_never_tried(
    machine, lines, monkeypatch, capfd
):
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert main(["arithmetic", "--loss", "none", "--model", "absent"]) == 2
    expected = f"warning: never tried on {machine}, only on x86-64"
    assert capfd.readouterr().err.splitlines()[:-1] == [expected] * lines


def test_without_its_flag_nothing_of_ray_or_of_a_tracker_is_imported():
    optional = {"ray", "wandb", "tensorboard"}
    code = f"import sys, runtime.launch, trainer; assert not {optional} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ("--sync_perod 3", "--sync_period INT"),  # the nearest known one
        ("--sync_period", "Missing value for argument '--sync_period'"),
        ("--steps many", "Error parsing --steps"),
        ("arithmetic gsm8k", "Unrecognized options: gsm8k"),
        ("arithmetic --data_dir x", "Unrecognized options: --data_dir"),
        ("gsm8k --tiny", "Unrecognized options: --tiny"),
        ("tldr --reward_modell x/y", "--reward_model STR"),
    ],
)
def test_what_tyro_finds_it_says_on_stderr_with_exit_code_2(arguments, expected, capfd):
    assert main(arguments.split()) == 2
    out, err = capfd.readouterr()
    assert expected in err and out == "", "nothing had begun"


def test_a_new_run_may_have_the_settings_of_an_earlier_one_and_flags_over_them(tmp_path):
    first = build_config(["gsm8k", "--preset", "k40", "--beta", "0.5", "--data_dir", "x"])
    first = dataclasses.replace(first, output_dir="runs/first", model="some/model")
    earlier = dataclasses.asdict(first) | {"json": True, "search_ahead": 3}  # flags no more
    (tmp_path / "config.json").write_text(json.dumps(earlier))
    file = str(tmp_path / "config.json")
    again = build_config(["--config", file, "--steps", "3"])
    assert again == dataclasses.replace(first, steps=3, output_dir="", config=file)
    over = build_config(["gsm8k", "--config", file, "--data_dir", "y", "--synchronous"])
    assert (over.options, over.constant_staleness) == ({"data_dir": "y"}, 0)


def test_a_config_does_not_change_after_it_was_checked():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build_config([]).steps = 3


def test_an_error_reaches_the_shell():
    result = tba("--steps", 0)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: --steps is 0: it must be positive\n"


def test_the_preset_lies_over_the_defaults_and_flags_over_the_preset(tmp_path):
    config = build_config(["gsm8k", "--steps", "3", "--beta", "0.5"])
    assert (config.steps, config.beta) == (3, 0.5), "flags"
    assert (config.queries_per_batch, config.responses_per_query) == (7, 20), "the preset"
    assert build_config(["gsm8k"]).learning_rate == 1e-5
    task = tmp_path / "some_task.py"
    task.write_text(OWN)
    assert build_config([str(task)]).steps == Config.steps
    task.write_text(OWN + "PRESETS = {'short': dict(steps=7)}\n")
    assert build_config([str(task)]).steps == 7, "its presets stand in it"


def test_a_tasks_own_settings_are_flags_and_lie_over_its_preset(capsys):
    config = build_config(["tldr", "--reward_model", "some/model", "--steps", "3"])
    preset = {"reference_model": "mnoukhov/pythia410m-sft-tldr"}
    assert (config.options, config.steps) == (preset | {"reward_model": "some/model"}, 3)
    tiny = build_config(["redteam", "--tiny"])
    assert tiny.preset == "tiny" and tiny == build_config(["redteam", "--preset", "tiny"])
    assert build_config(["competition_math", "--data_dir", "x"]).options == {"data_dir": "x"}
    assert main(["redteam", "--help"]) == 0
    assert "--victim_model" in capsys.readouterr().out


def test_a_comment_among_a_tasks_settings_does_no_harm(tmp_path, recwarn):
    grouped = own_task(tmp_path, "# Colors", "shade: int = 0", '"""How dark."""')
    assert build_config([grouped, "--shade", "3"]).options == {"shade": 3}
    assert not recwarn.list


def test_a_tasks_setting_may_not_have_the_name_of_a_runs(tmp_path):
    clash = own_task(tmp_path, "seed: int = 0")
    with pytest.raises(UserError, match="has a setting 'seed', which is one of every run"):
        build_config([clash, "--help"])


def test_a_synchronous_run_syncs_every_step_and_generates_what_it_trains_on():
    config = build_config(["gsm8k", "--synchronous"])
    assert (config.constant_staleness, config.sync_period) == (0, 1)
    assert config.samples_per_query == config.responses_per_query


def test_help_names_every_setting_with_its_meaning(capsys):
    assert main(["--help"]) == 0
    out, _ = capsys.readouterr()
    hidden = "task", "options", "search_ahead", "shares_gpu"
    for name in Config.__dataclass_fields__:
        assert name in hidden or re.search(rf"--{name}[ ,]", out), name
    text = re.sub(r"[│\s]+", " ", out)  # out of tyro's box
    assert "log Z of a query is estimated from them." in text


def test_the_command_line_imports_nothing_slow():
    """Keep torch out of tba.py: spawned children import it before their target sets anything."""
    slow = {"torch", "vllm", "transformers"}
    code = f"import sys, tba, config; assert not {slow} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("decorator", ["@dataclass", "@dataclass(frozen=True)"])
def test_a_tasks_setting_may_have_no_default_and_may_be_frozen(decorator, tmp_path):
    own = own_task(tmp_path, "level: int", decorator=decorator)
    assert build_config([own, "--level", "3"]).options == {"level": 3}
    assert main([own, "--help"]) == 0
    assert main([own]) == 2, "tyro asks for it"
