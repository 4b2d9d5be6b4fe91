"""Files, exit, signals and sinks do no harm: each program runs apart, and what it leaves is looked at from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flopmeter import load_run

BEGIN = """
import json, logging, os, signal, sys, threading, time, weakref
from pathlib import Path
import torch
import flopmeter

OUT = Path("out")
QUIET = {"wandb": {"enabled": False}, "monitoring": {"report": False, "sinks": []}}


def loop(**monitoring):
    config = {"monitoring": {**QUIET["monitoring"], **monitoring}}
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = flopmeter.watch(model, optimizer, output_dir=OUT, config=config)

    def train(num_steps):
        for _ in range(num_steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return monitor, train
"""
TIMEOUT_S = 180


def start(folder: Path, program: str, *before: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(BEGIN + textwrap.dedent(program))
    command = [sys.executable, *before, "program.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, said = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, said = process.communicate()
        said += "\nIT DID NOT END"
    return process.returncode, out, said


def run(folder: Path, program: str, *before: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    return end(start(folder, program, *before, env=env))


@contextmanager
def all_at_once(folder: Path, programs: Mapping[str, str]) -> Iterator[dict[str, tuple[int, str, str]]]:
    """Programs that wait more than they work, side by side."""
    started = {name: start(folder / name, program) for name, program in programs.items()}
    yield {name: end(process) for name, process in started.items()}


HANG = """
is_hanging = threading.Event()
released = threading.Event()
hung_on = set()


def hangs(name):
    original = getattr(os, name)

    def call(*args, **kwargs):
        target = args[0] if args else kwargs.get("path")
        try:
            where = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        except (OSError, TypeError):
            where = ""
        if is_hanging.is_set() and "out" in str(where).split("/"):
            hung_on.add(threading.current_thread() is threading.main_thread())
            released.wait()
        return original(*args, **kwargs)

    setattr(os, name, call)


for name in ("open", "write", "stat", "lstat", "fstat", "fsync", "mkdir", "replace", "rename", "unlink", "close"):
    hangs(name)
"""

HANGING = {
    "finish": "monitor, train = loop()\ntrain(20)\nis_hanging.set()\ntrain(20)\nmonitor.finish_training()",
    "exit": "monitor, train = loop()\ntrain(20)\nis_hanging.set()\ntrain(20)",
    "save": "monitor, train = loop()\ntrain(20)\nis_hanging.set()\nmonitor.save_logs()\nmonitor.summary()\ntrain(9)",
    "start": "is_hanging.set()\nmonitor, train = loop()\ntrain(20)\nmonitor.finish_training()",
    "pipe": "OUT.mkdir()\nos.mkfifo(OUT / 'run.jsonl')\nmonitor, train = loop(flush_every=5)\ntrain(400)",
    "pipe for the log": (
        "OUT.mkdir()\nos.mkfifo(OUT / 'training_log.json.tmp')\nmonitor, train = loop()\ntrain(9)\n"
        "monitor.save_logs()\nmonitor.finish_training()"
    ),
}


def test_a_disk_that_hangs_is_not_waited_for_for_ever_and_never_on_the_training_thread(tmp_path: Path) -> None:
    programs = {name: HANG + program + "\nprint('trained', True in hung_on)" for name, program in HANGING.items()}
    with all_at_once(tmp_path, programs) as answers:
        for name, (code, out, said) in answers.items():
            assert (name, code, out) == (name, 0, "trained False\n"), said
            assert "Traceback" not in said, said
    assert load_run(tmp_path / "exit" / "out").headers  # what was on disk before is sound
    assert json.loads((tmp_path / "pipe for the log" / "out" / "training_log.json").read_text())["step_logs"]


OLD_FILES = {
    "not UTF-8": "old.write_bytes(HEADER + b'\\xff\\xfe\\n')",
    "nested": "old.write_bytes(HEADER + b'[' * 200_000)",
    "one huge line": "old.write_bytes(b'x' * (9 << 20))",
    "another schema": "old.write_bytes(HEADER.replace(b'2', b'77', 1) + b'the old one\\n')",
    "no JSON": "old.write_bytes(b'\\x00' * 1000)",
    "a folder": "old.mkdir()",
    "full": "old.symlink_to('/dev/full')",
    "a link to nothing": "old.symlink_to('nowhere/at/all')",
    "a pipe": "os.mkfifo(old)",
}
RESUME = """
HEADER = b'{"schema": 2, "kind": "header", "started_at": 1000000000}\\n'
for name, action in json.loads(Path("cases.json").read_text()).items():
    OUT = Path(name)
    OUT.mkdir()
    old = OUT / "run.jsonl"
    exec(action)
    monitor, train = loop()
    train(5)
    monitor.finish_training()
print("trained")
"""


def test_watch_never_raises_over_what_an_earlier_run_has_left(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(OLD_FILES))
    code, out, said = run(tmp_path, RESUME)
    assert (code, out) == (0, "trained\n"), said
    assert "Traceback" not in said, said
    for name in ("not UTF-8", "nested", "one huge line", "another schema", "no JSON"):
        assert len(load_run(tmp_path / name)) == 5, name
    aside = tmp_path / "another schema" / "run.20010909-014640.jsonl"  # when the old one began
    assert aside.read_bytes().endswith(b"the old one\n")


def test_a_process_without_threads_to_spare_trains_on_unmeasured(tmp_path: Path) -> None:
    program = """
        def refuse(*_, **__):
            raise RuntimeError("can't start new thread")
        threading.Thread.start = refuse
        monitor, train = loop()
        train(5)
        monitor.log_step(5, loss=1.0)
        monitor.save_logs()
        print("trained", monitor.finish_training())
        """
    code, out, said = run(tmp_path, program)
    assert (code, out) == (0, "trained {}\n"), said
    assert said.count("can't start new thread") == 1
    assert "Traceback" not in said


LOST = {
    "folder deleted": "shutil.rmtree(OUT)",
    "folder made anew": "shutil.rmtree(OUT); OUT.mkdir()",
    "file deleted": "(OUT / 'run.jsonl').unlink()",
    "file replaced": "(OUT / 'new').write_bytes(b''); os.replace(OUT / 'new', OUT / 'run.jsonl')",
    "file emptied": "os.truncate(OUT / 'run.jsonl', 0)",
    "number taken": (
        "fd = next(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}') and "
        "os.path.samefile(f'/proc/self/fd/{n}', OUT / 'run.jsonl')); "
        "mine = os.open('mine', os.O_RDWR | os.O_CREAT); os.dup2(mine, fd); keep = fd"
    ),
}


def test_a_run_file_that_is_taken_away_is_noticed_and_written_anew(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps(LOST))
    program = """
        import shutil
        for name, action in json.loads(Path("cases.json").read_text()).items():
            OUT = Path(name)
            monitor, train = loop()
            train(10)
            monitor.save_logs()
            exec(action)
            train(30)
            monitor.finish_training()
        os.fstat(keep)  # somebody else's by now: not ours to close
        """
    code, _, said = run(tmp_path, program)
    assert code == 0, said
    assert said.count("while the run went on") == len(LOST), said
    assert "Traceback" not in said
    for name in LOST:
        found = load_run(tmp_path / name)
        assert len(found) >= 29, name
        assert found.summary is not None
        assert "written anew" in found.last("warning")["message"]
    assert (tmp_path / "mine").read_bytes() == b""


RAISING = """
class Bad(logging.Handler):
    def emit(self, record):
        raise RuntimeError("the handler's own")
def refuse(*args, **kwargs):
    raise RuntimeError("the program's own")
%s
OUT.write_text("a file where the folder should be")
monitor, train = loop(sinks=["tensorboard"])
train(3)
for _ in range(5):
    monitor.log_step(3, loss=torch.ones(3), epoch=object())
    monitor.set_training_phase("no such phase")
    monitor.save_logs()
train(3)
monitor.finish_training()
print("trained")
"""


@pytest.mark.parametrize(
    "setup",
    [
        "logging.getLogger().addHandler(Bad())",
        "logging.getLogger('flopmeter').addHandler(Bad())",
        "logging.getLogger('flopmeter').addFilter(refuse)",
        "logging.setLogRecordFactory(refuse)",
    ],
    ids=["handler of the root", "handler", "filter", "record factory"],
)
def test_logging_that_raises_does_not_reach_the_loop(tmp_path: Path, setup: str) -> None:
    code, out, said = run(tmp_path, RAISING % setup)
    assert (code, out) == (0, "trained\n"), said
    assert "'s own" not in said


ODD_FINDERS = {
    "no find_spec": (  # as was usual up to Python 3.11
        "class Odd:\n    def find_module(self, name, path=None): return None\nsys.meta_path.insert({place}, Odd())"
    ),
    "find_spec that raises for torch": (
        "class Odd:\n    seen = 0\n    def find_spec(self, name, path=None, target=None):\n"
        "        Odd.seen += name == 'torch'\n        if name == 'torch' and Odd.seen == 1: raise OSError('once')\n"
        "sys.meta_path.insert({place}, Odd())"
    ),
    "slots": (
        "import importlib.machinery\n"
        "class Loader:\n    __slots__ = ('real',)\n    def create_module(self, spec): return None\n"
        "    def exec_module(self, module):\n        module.__spec__.loader = self.real\n"
        "        self.real.exec_module(module)\n"
        "class Odd:\n    def find_spec(self, name, path=None, target=None):\n        if name != 'torch': return None\n"
        "        spec = importlib.machinery.PathFinder.find_spec(name, path)\n"
        "        loader = Loader(); loader.real = spec.loader; spec.loader = loader\n        return spec\n"
        "sys.meta_path.insert({place}, Odd())"
    ),
}


@pytest.mark.parametrize("name", ODD_FINDERS)
def test_odd_finders_do_not_keep_a_program_from_starting(tmp_path: Path, name: str) -> None:
    setup = ODD_FINDERS[name].format(place=1)
    (tmp_path / "a.py").write_text(f"import sys\n{setup}\nimport torch\nprint(torch.ones(2).sum().item())")
    answer = subprocess.run(
        [sys.executable, "-m", "flopmeter", "run", "a.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (0, "2.0\n"), answer.stderr
    assert "Traceback" not in answer.stderr
    assert "did not import torch" not in answer.stderr


TAKEN_APART = {
    "no finders": "sys.meta_path.clear()",
    "no finders and no modules": "sys.meta_path.clear(); sys.modules.pop('json', None)",
    "closed": "sys.stderr.close(); sys.stdout.close()",
    "gone": "sys.stderr = sys.stdout = None",
    "no main": "sys.modules.pop('__main__')",
    "no arguments": "del sys.argv",
}


@pytest.mark.parametrize("is_training", [False, True])
def test_there_is_no_traceback_at_the_end_of_a_program_that_took_python_apart(
    tmp_path: Path, is_training: bool
) -> None:
    training = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
    started = {}
    for name, action in TAKEN_APART.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(f"import sys\n{training if is_training else ''}\n{action}")
        command = [sys.executable, "-m", "flopmeter", "run", "-o", "out", "a.py"]
        pipe = subprocess.PIPE
        started[name] = subprocess.Popen(command, cwd=tmp_path / name, stdout=pipe, stderr=pipe, text=True)
    for name, process in started.items():
        code, _, said = end(process)
        assert (name, code) == (name, 0), said
        assert "Traceback" not in said, (name, said)
        assert "Exception ignored" not in said, (name, said)


INTERRUPTED = {
    "in a sleep": "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); time.sleep(60)",
    "in training": "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start(); train(10**9)",
    # What is run from a string clears a flag of Python's, by which it ends with another exit code.
    "with a handler at the end": (
        "import atexit; atexit.register(lambda: exec('x = 1', {})); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    ),
    "in a handler": (
        "def stop(*_): raise KeyboardInterrupt\nsignal.signal(signal.SIGINT, stop)\nos.kill(os.getpid(), signal.SIGINT)"
    ),
}
PLAIN = """
class Nothing:
    def finish_training(self): pass
def loop(**_):
    model = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(num_steps):
        for _ in range(num_steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return Nothing(), train
"""


def test_ctrl_c_ends_with_the_exit_code_that_it_has_without_us(tmp_path: Path) -> None:
    made = "monitor, train = loop(report=True)\ntrain(12)\n"
    programs = {name: made + action for name, action in INTERRUPTED.items()}
    programs |= {f"plain {name}": PLAIN + made + action for name, action in INTERRUPTED.items()}
    with all_at_once(tmp_path, programs) as answers:
        codes = {name: code for name, (code, _, _) in answers.items()}
        for name in INTERRUPTED:
            assert (name, codes[name]) == (name, codes[f"plain {name}"]), answers[name][2]
            assert load_run(tmp_path / name / "out").failure == "KeyboardInterrupt"
    assert set(codes.values()) == {1, -signal.SIGINT}  # both kinds were met


def test_a_program_under_run_ends_with_its_own_exit_code_at_ctrl_c(tmp_path: Path) -> None:
    made = PLAIN + "monitor, train = loop()\ntrain(12)\n"
    codes = {}
    for name in ("in a sleep", "with a handler at the end"):
        for before in ((), ("-m", "flopmeter", "run", "-q", "-o", "out")):
            codes[name, bool(before)], _, said = run(tmp_path / name, made + INTERRUPTED[name], *before)
            assert "Traceback (most recent call last)" in said
        assert codes[name, True] == codes[name, False]
        assert load_run(tmp_path / name / "out").failure == "KeyboardInterrupt"


SIGNALLED = {
    # the program after 20 steps; what ends it; steps in the record at least, or None where there is no last line
    "in a sleep": ("ready(); time.sleep(60)", 20),
    "in training": ("ready(); train(10**9)", 20),
    "in native code that does not come back": (
        "import ctypes\nready()\nctypes.CDLL(None).pause()\nwhile True: ctypes.CDLL(None).sleep(100)",
        20,
    ),
    "with a forked child": (
        "child = os.fork()\nif child == 0: time.sleep(60); os._exit(3)\n"
        "os.kill(child, signal.SIGTERM)\nprint(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "ready(); time.sleep(60)",
        20,
    ),
    "with workers of a loader": (
        "data = torch.utils.data.DataLoader(torch.ones(8, 8), num_workers=1, multiprocessing_context='fork')\n"
        "workers = iter(data)\nnext(workers)\nos.kill(workers._workers[0].pid, signal.SIGTERM)\n"
        "workers._workers[0].join()\nprint(workers._workers[0].exitcode)\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_DFL)\nready(); time.sleep(60)",
        20,
    ),
    "a handler set later": (
        "def leave(*_): print('mine', flush=True); os._exit(7)\nsignal.signal(signal.SIGTERM, leave)\n"
        "ready(); time.sleep(60)",
        None,
    ),
    "ignored": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready(); sys.stdin.read(); print('done')", 20),
    "after the end": ("monitor.finish_training()\nready(); time.sleep(60)", 20),
}
READY = """
def ready():
    print("ready", signal.getsignal(signal.SIGTERM) if not callable(signal.getsignal(signal.SIGTERM)) else "own")
    sys.stdout.flush()
"""


def signalled(processes: Mapping[str, subprocess.Popen[str]], number: int) -> dict[str, tuple[int, str]]:
    said = {}
    for name, process in processes.items():
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] and not lines[-1].startswith("ready"):
            lines.append(process.stdout.readline())
        said[name] = "".join(lines)
        process.send_signal(number)
    answers = {name: end(process) for name, process in processes.items()}
    return {name: (code, said[name] + out) for name, (code, out, _) in answers.items()}


def test_sigterm_leaves_a_last_line_and_the_process_ends_as_without_us(tmp_path: Path) -> None:
    made = "monitor, train = loop(flush_s=1000.0)\ntrain(20)\n"
    half = len(SIGNALLED) // 2
    for names in (list(SIGNALLED)[:half], list(SIGNALLED)[half:]):
        ours = {name: start(tmp_path / name, READY + made + SIGNALLED[name][0]) for name in names}
        plain = {name: start(tmp_path / f"plain {name}", PLAIN + READY + made + SIGNALLED[name][0]) for name in names}
        without = signalled(plain, signal.SIGTERM)
        for name, answer in signalled(ours, signal.SIGTERM).items():
            assert (name, answer) == (name, without[name])
            num_steps = SIGNALLED[name][1]
            if num_steps is None:
                continue
            found = load_run(tmp_path / name / "out")
            assert (name, len(found) >= num_steps, found.summary is not None) == (name, True, True)
            assert found.failure == (None if name in ("ignored", "after the end") else "SIGTERM")


def test_a_terminal_that_closes_leaves_a_last_line_too_and_a_handler_from_before_is_the_only_one(
    tmp_path: Path,
) -> None:
    made = "monitor, train = loop(flush_s=1000.0)\ntrain(20)\nready()\ntime.sleep(60)"
    own = "def leave(*_): print('mine', flush=True); sys.exit(5)\nsignal.signal(signal.SIGHUP, leave)\n"
    usual = "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # under nohup a child is born deaf to it
    programs = {"default": usual + READY + made, "own": own + READY + made}
    answers = signalled({name: start(tmp_path / name, code) for name, code in programs.items()}, signal.SIGHUP)
    assert answers["default"][0] == -signal.SIGHUP
    assert load_run(tmp_path / "default" / "out").failure == "SIGHUP"
    assert (answers["own"][0], answers["own"][1].endswith("mine\n")) == (5, True)
    assert load_run(tmp_path / "own" / "out").failure is None  # it went out by the door


MASKS = """
class Text(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.out = torch.nn.Linear(4, 4)
    def forward(self, input_ids, attention_mask):
        return self.out(self.table(input_ids[:, :2]))
model = Text()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ROWS, LENGTH = 8, 32768  # a mask of 2 MB
ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
masks = []
def train(num_steps):
    for _ in range(num_steps):
        mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
        masks.append(weakref.ref(mask))
        model(input_ids=ids, attention_mask=mask).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del mask
    return sum(ref() is not None for ref in masks)
def watch():
    return flopmeter.watch(model, optimizer, output_dir=OUT, config=QUIET)
"""


def test_what_waits_for_a_disk_that_hangs_is_bounded_in_bytes(tmp_path: Path) -> None:
    program = (
        MASKS
        + HANG
        + """
monitor = watch()
train(20)
monitor.save_logs()
is_hanging.set()
monitor.log_metrics({"a": 1.0})
alive = train(120)
is_hanging.clear()
released.set()
monitor.finish_training()
print(alive * 2 <= 64, len(flopmeter.load_run(OUT)))
"""
    )
    code, out, said = run(tmp_path, program)
    assert (code, out) == (0, "True 140\n"), said
    found = load_run(tmp_path / "out")
    per_second, step_s = found.column("perf/tokens_per_second"), found.column("perf/step_time")
    tokens = [rate * seconds for rate, seconds in zip(per_second, step_s, strict=True)]
    assert tokens == pytest.approx([8 * 32768] * 140)  # whichever thread has summed them up


def test_a_forked_child_that_trains_keeps_nothing(tmp_path: Path) -> None:
    program = (
        MASKS
        + """
monitor = watch()
train(5)
child = os.fork()
if child == 0:
    alive = train(60)
    os._exit(alive if alive < 100 else 100)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) <= 8)
train(5)
monitor.finish_training()
print(len(flopmeter.load_run(OUT)))
"""
    )
    code, out, said = run(tmp_path, program)
    assert (code, out) == (0, "True\n10\n"), said


def many_steps(path: Path, num_steps: int) -> None:
    path.mkdir()
    lines: list[dict[str, Any]] = [{"kind": "header", "schema": 2, "started_at": 1e9}]
    lines += [{"kind": "step", "step": n, "time": 1e9 + n, "metrics": {"training/loss": 1.0}} for n in range(num_steps)]
    (path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_long_run_gets_its_training_log_when_it_is_asked_for(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    for folder, num_steps in ((short, 19_990), (long, 19_991)):
        folder.mkdir()
        many_steps(folder / "out", num_steps)
        code, _, said = run(folder, "monitor, train = loop()\ntrain(10)\nmonitor.finish_training()")
        assert code == 0, said
        assert ("--format training_log" in said) == (folder is long)
        assert (folder / "out" / "training_log.json").exists() == (folder is short)
    command = [sys.executable, "-m", "flopmeter", "report", "out", "--format", "training_log"]
    subprocess.run(command, cwd=long, check=True, capture_output=True)
    assert len(json.loads((long / "out" / "training_log.json").read_text())["step_logs"]) == 20_001
    asks = """
        monitor, train = loop()
        monitor.start_training()
        (OUT / "training_log.json").unlink()
        monitor.save_logs()
        assert (OUT / "training_log.json").exists()
        """
    code, _, said = run(long, asks)
    assert code == 0, said


def test_an_upload_to_wandb_is_given_the_time_that_it_has(tmp_path: Path) -> None:
    program = """
        import types
        finished = threading.Event()
        class Settings:
            mode, finish_timeout, sync_dir, model_fields_set = "offline", 60.0, "", set()
        class Run:
            settings, starting_step, step = Settings(), 0, 0
            config = types.SimpleNamespace(update=lambda *a, **k: None)
            def log(self, *a, **k): pass
            def define_metric(self, *a, **k): pass
            def finish(self):
                patient.wait()
                finished.set()
        patient = threading.Event()
        wandb = types.ModuleType("wandb")
        wandb.run, wandb.init = None, lambda **k: Run()
        wandb.setup = lambda: types.SimpleNamespace(settings=Settings())
        wandb.errors = types.SimpleNamespace(Error=RuntimeError, UsageError=RuntimeError)
        wandb.login = lambda **k: True
        sys.modules["wandb"] = wandb
        join = threading.Thread.join
        def scaled(self, timeout=None):
            if timeout is not None and timeout >= 60 and "wandb" in self.name:
                patient.set()
            join(self, timeout if patient.is_set() or timeout is None else min(timeout, 1.0))
        threading.Thread.join = scaled
        monitor, train = loop(sinks=["wandb"])
        train(5)
        monitor.finish_training()
        print(finished.is_set())
        """
    code, out, said = run(tmp_path, program)
    assert (code, out) == (0, "True\n"), said
    assert "left behind" not in said


def test_kill_9_loses_a_bounded_number_of_steps_where_our_thread_seldom_gets_a_turn(tmp_path: Path) -> None:
    program = """
        monitor, train = loop(flush_s=1000.0, mfu_calculation_mode="estimate")
        sleep = time.sleep
        time.sleep = lambda s: sleep(s if threading.current_thread() is threading.main_thread() else max(s, 0.1))
        train(2000)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    assert run(tmp_path, program)[0] == -signal.SIGKILL
    # Two times the default of 200 may wait, and some more while our thread has no turn at all.
    assert len(load_run(tmp_path / "out")) >= 2000 - 5 * 200


BAD_VALUES = """
import urllib.request, socket
class Thing:
    def __float__(self): raise ValueError("no number")
    def __repr__(self): raise ValueError("no text")
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
config = {"monitoring": {"report": False, "sinks": ["prometheus", "tensorboard"]}, "prometheus": {"port": port},
          "wandb": {"enabled": False}}
monitor = flopmeter.TrainingMonitor(OUT, config)
monitor.start_training()
for step in range(1, 6):
    monitor.log_step(step, loss=1.0)
bad = [{"note": "text"}, {"a": Thing()}, {"b": None}, {"c": [1, 2]}, {"d": torch.ones(3)}, {"e": 10**400},
       {3: 1.0}, {None: 1.0}, {"dataset/\\ud800/loss": 1.0}, {"f": 1j}, {"g": b"x"}]
for _ in range(3):
    for metrics in bad:
        monitor.log_metrics({**metrics, "good": 0.5})
    for number in ("five", 2**80, float("nan"), object()):
        monitor.log_metrics({"good": 0.5}, step=number)
monitor.log_metrics({"last": 0.25})
monitor.latest(wait_s=10)
page = ""
for _ in range(400):
    try:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    except OSError as error:
        page = str(error)
        if "500" in page:
            break
    if "flopmeter_last 0.25" in page or "flopmeter_last{" in page:
        break
    time.sleep(0.05)
print("flopmeter_last" in page, "flopmeter_good" in page, "500" in page and "Error" in page)
monitor.finish_training()
"""


def test_a_bad_value_costs_itself_and_no_sink(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    event_file = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    code, out, said = run(tmp_path, BAD_VALUES)
    assert (code, out) == (0, "True True False\n"), said
    assert "Traceback" not in said
    assert "switched off" not in said
    assert said.count("note is left out") == 1
    found = event_file.EventAccumulator(str(tmp_path / "out" / "tensorboard")).Reload()
    assert [event.value for event in found.Scalars("last")] == [0.25]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    program = """
        OUT.mkdir()
        for name in ("training_log.json", "report.html"):
            for draft in (f"{name}.tmp", f".{name}.tmp", f".{name}.{os.getpid()}.tmp", name):
                (OUT / draft).symlink_to(os.path.abspath("precious"))
        Path("precious").write_text("precious")
        monitor, train = loop(report=True)
        train(9)
        monitor.save_logs()
        monitor.finish_training()
        """
    code, _, said = run(tmp_path, program)
    assert code == 0, said
    assert (tmp_path / "precious").read_text() == "precious"
    for name in ("training_log.json", "report.html"):
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).stat().st_size > 100
