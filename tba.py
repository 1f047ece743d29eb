"""Trajectory Balance with Asynchrony, on one machine: the command line.

python tba.py                       # the tasks, and how to begin
python tba.py arithmetic            # the demo, no GPU needed
python tba.py gsm8k                 # RhoMath-1B: the trainer on GPU 0, searchers on others
python tba.py gsm8k --eval_only --model runs/…/model
python tba.py --report runs/…
python tba.py --help
"""

import gc
import os
import sys
from _frozen_importlib_external import PathFinder  # part of Python itself: no file can hide it

OURS = "buffer config learner loss rollouts searcher tba trainer weights".split()
# What torch, transformers and vLLM make while they are imported stays: to look for garbage among it
# took a fifth of the start.
gc.set_threshold(100_000)


def main(arguments: list[str]) -> int:
    """Parse, check, launch. Returns the exit code."""
    # Here and not at the top: children import this file too, and torch not before their target.
    from config import UserError
    from launch.command_line import build_config, usage

    if not arguments:
        print(usage(), file=sys.stderr)
        return 2
    try:
        config = build_config(arguments)
        if config.report:
            from launch.display import html_report  # without all that a run imports

            return html_report.show(config.report)
        from launch import checks, evaluate, launcher
        from launch.planning import plan

        if config.plan:
            return plan.show_plan(*checks.check_for_plan(config))
        return evaluate.evaluate_only(config) if config.eval_only else launcher.launch(config)
    except SystemExit as end:  # tyro has shown help, or what is wrong with a flag
        return end.code
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def end_at_once(number: int, frame) -> None:
    """Handle Ctrl-C until there is a run, which has a handler of its own.

    Not by an exception: what is being imported may swallow it, and the hub's client would wait for
    the files that its threads are at. It never goes on with a part of one: parts are removed.
    """
    try:
        os.write(2, b"interrupted before the run began: nothing of it was written\n")
        opened = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        for file in opened:
            if file.endswith(".incomplete"):
                os.unlink(file)
    finally:
        os._exit(128 + number)


def check_names() -> None:
    """End where a file beside this one hides a module that is installed, before any is imported."""
    here = os.path.dirname(os.path.realpath(__file__))
    others = [path for path in sys.path if os.path.realpath(path) != here]
    for file in os.listdir(here):
        name = file.removesuffix(".py")
        if name not in (file, *OURS) and PathFinder.find_spec(name, others):
            problem = f"{file}, beside tba.py, hides the module {name}: rename it"
            print(f"error: {problem}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    check_names()
    import signal

    signal.signal(signal.SIGINT, end_at_once)
    if sys.stdout:  # None: it was closed
        sys.stdout.reconfigure(errors="backslashreplace")  # it may know nothing but ASCII
    sys.exit(main(sys.argv[1:]))
