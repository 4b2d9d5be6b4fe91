"""`flopmeter run`: a program is to its user what it is under `python`; and the rule for what a step is."""

from __future__ import annotations

import copy
import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from flopmeter import Run, TrainingMonitor, load_run
from flopmeter.integrations._called import Calls, key_of, live, owners, parameters_of
from flopmeter.integrations._training import (
    MAX_STRAY_TURNS,
    MAX_TURNS_APART,
    PATIENCE_TURNS,
    TURNS_WITHOUT_MODULE,
    StepRule,
    Training,
)
from flopmeter.integrations.script import Program

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "tests" / "programs"

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


def python(*arguments: str | Path, stdin: str = "", **options: Any) -> tuple[int, str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    answer = subprocess.run(
        [sys.executable, *map(str, arguments)], input=stdin, capture_output=True, text=True, env=environment, **options
    )
    return answer.returncode, answer.stdout, answer.stderr


def flopmeter_run(*arguments: str | Path, **options: Any) -> tuple[int, str, str]:
    return python("-m", "flopmeter", "run", *arguments, **options)


ORDINARY = {
    "what a program knows of itself": """
        import os, sys, __main__, inspect, subprocess
        print(__name__, sys.argv, sys.orig_argv[1:], sys.path, sys.flags, __main__.__spec__, __main__.__file__)
        print(sorted(vars(__main__)), sorted(os.environ.items()), 'flopmeter' in sys.modules)
        def function(): pass
        print(inspect.getsource(function), inspect.getmodule(function))
        print(subprocess.run([sys.executable, '-c', 'import os, sys; print(sorted(os.environ.items()), sys.path)'],
                             capture_output=True, text=True).stdout)
        """,
    "an error": """
        def inner(x):
            try:
                return 1 / x
            except ZeroDivisionError as error:
                raise ValueError('inner') from error
        inner(0)
        """,
    "an exit code": "import sys; sys.exit(3)",
    "an exit message": "import sys; sys.exit('that is all')",
    "a syntax error": "print('a'\nx = ",
    "death by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "ctrl-c": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "input": "print(input('name? '), open(0).read())",
    "a debugger": "x = 3\nbreakpoint()\nprint('after', x)",
    "pickling": """
        import pickle
        class Thing:
            pass
        print(pickle.dumps(Thing()), type(pickle.loads(pickle.dumps(Thing()))) is Thing)
        """,
    "child processes": """
        import multiprocessing, sys
        def work(x):
            return x * 2, 'flopmeter' in sys.modules, __name__
        if __name__ == '__main__':
            for method in ('fork', 'spawn'):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(work, [1, 2]))
        """,
    "an exception hook": """
        import sys
        sys.excepthook = lambda kind, value, trace: print(kind, value, trace.tb_lineno, trace.tb_next)
        raise KeyError('gone')
        """,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_a_program_behaves_as_under_python(tmp_path: Path, name: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(ORDINARY[name]))
    arguments = ("program.py", "--config", "mine", "-q", "--", "-m")
    given = {"cwd": tmp_path, "stdin": "p x\nc\n", "env": {"PYTHONPATH": str(tmp_path / "more")}}
    assert flopmeter_run("--quiet", *arguments, **given) == python(*arguments, **given)


def test_a_module_with_relative_imports_behaves_as_under_python_m(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("print('init')")
    (package / "near.py").write_text("value = 5")
    (package / "train.py").write_text(
        "import sys\nfrom .near import value\nprint(value, sys.argv, __spec__.name)\n1/0\n"
    )
    arguments = ("-m", "package.train", "--output-dir", "x", "--quiet")
    alone = python(*arguments, cwd=tmp_path)
    assert flopmeter_run("--quiet", *arguments, cwd=tmp_path) == alone
    together = ("-mpackage.train", *arguments[2:])
    assert flopmeter_run("-q", "-o", "there", *together, cwd=tmp_path) == alone


def test_options_of_python_itself_reach_the_program(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text("import sys; print(sys.flags.optimize, sys.warnoptions, sys._xoptions)")
    options = ("-O", "-W", "error::UserWarning", "-X", "mine=1")
    _, out, _ = python(*options, "-m", "flopmeter", "run", "-q", "show.py", cwd=tmp_path)
    assert out == "1 ['error::UserWarning'] {'mine': '1'}\n" == python(*options, "show.py", cwd=tmp_path)[1]


def test_a_missing_script_is_pythons_own_error(tmp_path: Path) -> None:
    code, _, said = flopmeter_run("-q", "nowhere.py", cwd=tmp_path)
    assert (code, said) == (2, python("nowhere.py", cwd=tmp_path)[2])


FAILING = {
    "no such script": ("nowhere.py",),
    "no such module": ("-m", "nowhere"),
    "no such module in a package": ("-m", "package.nowhere"),
    "an error before torch": ("wrong.py",),
    "the same in a module": ("-m", "wrong"),
    "a package that cannot be imported": ("-m", "broken.train"),
    "an import that fails": ("importing.py",),
    "no such folder": ("nowhere/train.py", "--lr", "1"),
    "a folder without a program": ("package",),
}


@pytest.mark.parametrize("name", FAILING)
def test_to_an_error_before_torch_nothing_is_added(tmp_path: Path, name: str) -> None:
    for package in ("package", "broken"):
        (tmp_path / package).mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "broken" / "__init__.py").write_text("import nonsense")
    (tmp_path / "wrong.py").write_text("print('starts')\n1/0\nimport torch")
    (tmp_path / "importing.py").write_text("import nonsense")
    answer = flopmeter_run(*FAILING[name], cwd=tmp_path)
    assert answer == python(*FAILING[name], cwd=tmp_path)
    assert answer[0] != 0


def test_to_an_error_before_the_first_step_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import torch\ntorch.nn.Linear(2, 2)(torch.rand(1, 3))")
    assert flopmeter_run("a.py", cwd=tmp_path) == python("a.py", cwd=tmp_path)


@pytest.mark.parametrize("arguments", [("a.py",), ("-m", "a"), ("folder",)])
def test_a_program_that_ends_well_without_torch_is_told_so(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "folder").mkdir()
    for script in (tmp_path / "a.py", tmp_path / "folder" / "__main__.py"):
        script.write_text("import os; os.chdir('/')")
    code, _, said = flopmeter_run(*arguments, cwd=tmp_path)
    assert (code, said) == (0, "flopmeter: nothing to measure: the program did not import torch\n")


def test_the_environments_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.mine = 'ran'; own = 1")
    (tmp_path / "program.py").write_text("import sys, sitecustomize; print(sys.mine, sitecustomize.own)")
    given = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}}
    assert flopmeter_run("-q", "program.py", **given) == (0, "ran 1\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to run"),
        (("-m",), "nothing to run"),
        (("--outptu", "x", "a.py"), "--outptu"),
        (("--mode", "smrt", "a.py"), "--mode: unknown 'smrt': did you mean 'smart'? (it is one of smart, "),
        (("--sinks", "carrier_pigeon", "a.py"), "carrier_pigeon"),
        (("--config", "nowhere.yaml", "a.py"), "nowhere.yaml"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2_before_the_program_starts(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "a.py").write_text("print('started')")
    answer = flopmeter_run(*arguments, cwd=tmp_path)
    assert answer[:2] == (2, "")
    assert message in answer[2]
    assert answer[2].count("\n") == 1


def test_a_torch_that_cannot_be_imported_fails_as_under_python(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch is broken')")
    (tmp_path / "a.py").write_text("import torch")
    assert flopmeter_run("-q", "a.py", cwd=tmp_path) == python("a.py", cwd=tmp_path)


def test_without_torch_it_says_so_and_loads_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import sys; print([m for m in sys.modules if 'flopmeter' in m or 'typer' in m])")
    code, out, said = flopmeter_run("a.py", cwd=tmp_path)
    assert (code, out) == (0, "[]\n")
    assert said == "flopmeter: nothing to measure: the program did not import torch\n"
    assert not (tmp_path / "runs").exists()


def test_without_training_it_says_so_and_loads_no_monitor(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "import importlib.util, sys; importlib.util.find_spec('torch'); import torch, pickle\n"
        "torch.nn.Linear(2, 2)(torch.rand(1, 2)).sum().backward()\n"
        "print('flopmeter.monitor' in sys.modules, type(torch.__loader__).__name__, vars(torch.__loader__).keys())"
    )
    code, out, said = flopmeter_run("a.py", cwd=tmp_path)
    assert (code, out) == (0, "False SourceFileLoader dict_keys(['name', 'path'])\n")
    assert said.startswith("flopmeter: nothing to measure: 1 backward pass and no step of a torch optimizer: where")
    assert "monitor.log_step(step)" in said
    assert said.count("\n") == 1


TRAINING = """
import sys, traceback
import torch
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index == 60: raise LookupError('sample 60')
        return torch.ones(4) * index
class Bad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.sum()
    @staticmethod
    def backward(ctx, grad): raise ArithmeticError('backward')
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler('cpu', init_scale=1.0)
def show(action):
    try: action()
    except Exception: traceback.print_exc()
def epoch():
    for batch in DataLoader(Data(), 4):
        model(batch).sum().backward()
        optimizer.step()
show(epoch)
show(lambda: Bad.apply(model(torch.ones(4))).backward())
show(lambda: scaler.step(optimizer))
raise RuntimeError('end')
"""


def test_no_frame_of_ours_is_in_a_traceback_of_a_measured_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    ours = flopmeter_run("--quiet", "-o", "record", "train.py", cwd=tmp_path)
    assert ours == python("train.py", cwd=tmp_path)
    assert [word in ours[2] for word in ("sample 60", "ArithmeticError", "_scale is None", "end")] == [True] * 4
    assert load_run(tmp_path / "record").step[-1] == 15


PLAIN = """
import os, signal, sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(num_steps):
    for _ in range(num_steps):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
train(12)
"""


def test_ctrl_c_during_the_training_is_still_death_by_that_signal(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN + "os.kill(os.getpid(), signal.SIGINT)")
    ours = flopmeter_run("--quiet", "-o", "record", "train.py", cwd=tmp_path)
    assert ours == python("train.py", cwd=tmp_path)
    assert ours[0] == -signal.SIGINT
    assert load_run(tmp_path / "record").summary["failure"] == "KeyboardInterrupt"


@pytest.mark.parametrize(("closed", "program"), [("1", PLAIN), ("2", PLAIN), ("2", "")])
def test_a_program_runs_with_its_output_closed(tmp_path: Path, closed: str, program: str) -> None:
    (tmp_path / "train.py").write_text(f"{program}\nprint('done', flush=True)")
    command = f'"{sys.executable}" -m flopmeter run -o record train.py {closed}>&-'
    answer = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == ("done\n" if closed == "2" else "")
    assert (tmp_path / "record").exists() == bool(program)


@pytest.mark.parametrize("moment", ["before", "during"])
def test_the_record_is_where_it_was_asked_for_wherever_the_program_goes(tmp_path: Path, moment: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    move, start = "os.chdir('elsewhere')\n", PLAIN.replace("train(12)", "")
    program = f"{start}{move}train(12)" if moment == "before" else f"{start}train(6)\n{move}train(6)"
    code, _, said = flopmeter_run("-o", "record", "-", stdin=program, cwd=tmp_path)
    assert code == 0, said
    assert load_run(tmp_path / "record").step[-1] == 12
    assert (tmp_path / "record" / "report.html").exists()
    assert said.strip().endswith(f"run: {tmp_path / 'record'}")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_compiled_step_of_the_optimizer_is_compiled_without_us(tmp_path: Path) -> None:
    compiled = "@torch.compile(backend='eager')\ndef step(): optimizer.step()\n"
    program = PLAIN.replace("def train", compiled + "def train").replace("        optimizer.step()", "        step()")
    (tmp_path / "train.py").write_text(program)
    code, _, said = flopmeter_run("-o", "record", "train.py", cwd=tmp_path)
    assert code == 0, said
    assert "Dynamo" not in said
    run = load_run(tmp_path / "record")
    assert run.step[-1] == 12
    assert 0 not in run.column("perf/model_flop")


def test_switched_off_there_is_no_record(tmp_path: Path) -> None:
    script = PROGRAMS / "gan.py"
    answer = flopmeter_run("-o", "record", script, cwd=tmp_path, env={"FLOPMETER": "off"})
    assert answer == python(script, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_uses_flopmeter_is_not_measured_twice(tmp_path: Path) -> None:
    script = ROOT / "examples" / "plain_loop.py"
    code, _, said = flopmeter_run("-o", "outer", script, "--steps", "8", "--output-dir", "inner", cwd=tmp_path)
    assert code == 0, said
    assert len(load_run(tmp_path / "inner")) == 8
    assert not (tmp_path / "outer").exists()
    assert "uses flopmeter itself" in said


DISTRIBUTED = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.manual_seed(0)
model = torch.nn.Linear(8, 8, bias=False)
if 'RANK' in os.environ:
    dist.init_process_group('gloo')
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.is_initialized():
    dist.destroy_process_group()
"""
DOCUMENTED = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "measure_a_script.md").read_text(), re.DOTALL)


def test_a_folder_that_cannot_be_written_to_is_the_reason_that_is_given(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    (tmp_path / "a_file").write_text("")
    code, _, said = python("-m", "flopmeter", "run", "-o", "a_file/record", "train.py", cwd=tmp_path)
    assert code == 0, said
    assert said.splitlines()[-1] == "flopmeter: no record: nothing could be written to a_file/record"


@pytest.mark.parametrize("setup", ["", "import logging; logging.basicConfig()"])
def test_a_warning_of_ours_says_whose_it_is(tmp_path: Path, setup: str) -> None:
    (tmp_path / "train.py").write_text(setup + DISTRIBUTED)
    for _ in range(2):
        code, _, said = flopmeter_run("-o", "record", "train.py", cwd=tmp_path)
        assert code == 0, said
    signature = "WARNING:flopmeter:" if setup else "flopmeter: "
    (line,) = [line for line in said.splitlines() if "a run that has ended" in line]
    assert re.fullmatch(rf"{signature}record/run.jsonl was a run that has ended: it is now run\.[-\d]+\.jsonl", line)


def test_under_torchrun_each_rank_is_measured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DISTRIBUTED)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "flopmeter", "run")
    code, _, said = python(*launch, "-o", "record", "train.py", cwd=tmp_path)
    assert code == 0, said
    run = load_run(tmp_path / "record")
    assert run.step[-1] == 8
    assert (run.header.model, run.header.world_size, run.header.num_parameters) == ("Linear", 2, 64)
    assert said.count("flopmeter: MFU") == 1
    assert run.last("ranks")["missing"] == []  # the end of a job waits for the other rank's last word


@pytest.mark.parametrize("command", [line for block in DOCUMENTED for line in block.splitlines()])
def test_the_documented_commands_work(tmp_path: Path, command: str) -> None:
    if find_spec(command.split()[0].replace("torchrun", "torch").replace("flopmeter", "torch")) is None:
        pytest.skip("its launcher is not installed")
    (tmp_path / "my_package").mkdir()
    for script in (tmp_path / "train.py", tmp_path / "my_package" / "train.py"):
        script.write_text(DISTRIBUTED)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    answer = subprocess.run(command.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    (record,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"train-\d{8}-\d{6}", record.name)
    assert load_run(record).step[-1] == 8


# The rule for a step, by itself: turns of optimizers A, B, ... each after a forward pass, F = none in between.
CYCLES = {
    "one optimizer": ("A", "AAAA", 4),
    "two that take turns": ("DG", "DGDGDG", 3),
    "five turns of one to one of the other": ("DG", "DDDDDGDDDDDG", 2),
    "the other order": ("DG", "GDDDGDDD", 2),  # G D, D D G, and the next one is not over
    "three": ("ABC", "ABCABC", 2),
}


@pytest.mark.parametrize("name", CYCLES)
def test_a_step_is_one_cycle_of_the_optimizers(name: str) -> None:
    cycle, turns, num_steps = CYCLES[name]
    rule = StepRule(set(cycle))
    assert sum(rule.ends_at(key, has_forward=True) for key in turns) == num_steps
    assert not rule.is_lost


def test_turns_without_a_forward_pass_belong_to_the_step_before() -> None:
    rule = StepRule({"A"})
    assert [rule.ends_at("A", has_forward=flag) for flag in (True, False, False, True)] == [True, False, False, True]


def test_optimizers_that_fit_no_cycle_mean_that_something_else_is_trained() -> None:
    rule = StepRule({"A"})
    for _ in range(MAX_STRAY_TURNS):
        assert not rule.is_lost
        assert not rule.ends_at("new", has_forward=True)
    assert rule.is_lost


def test_one_that_joins_in_means_that_we_look_again_and_one_that_seldom_does_means_nothing() -> None:
    for every, is_lost in ((1, True), (3, True), (20, False)):
        rule = StepRule({"A"})
        for index in range(20 * MAX_STRAY_TURNS):
            assert rule.ends_at("A", has_forward=True)
            if index % every == 0:
                rule.ends_at("other", has_forward=True)
        assert rule.is_lost == is_lost
        assert rule.num_missed == 0


@pytest.mark.parametrize(("longest", "limit"), [(5, MAX_TURNS_APART), (20, 160)])  # eight times as long
def test_one_of_a_cycle_that_goes_on_alone_far_longer_than_ever_means_that_the_cycle_is_over(
    longest: int, limit: int
) -> None:
    rule = StepRule({"D", "G"})
    rule.ends_at("G", has_forward=True)  # both have been seen
    assert rule.ends_at("D", has_forward=True)
    assert [rule.ends_at(key, has_forward=True) for key in "D" * longest + "G"][-1]
    assert not any(rule.ends_at("D", has_forward=True) for _ in range(limit - 1))
    assert not rule.is_lost
    assert not rule.ends_at("D", has_forward=True)
    assert (rule.is_lost, rule.num_missed) == (True, limit - 1)


def test_a_stray_step_now_and_then_means_nothing() -> None:
    rule = StepRule({"A"})
    for _ in range(MAX_STRAY_TURNS * 2):
        assert rule.ends_at("A", has_forward=True)
        assert not rule.ends_at("other", has_forward=False)
    assert not rule.is_lost


def test_an_optimizer_that_exists_and_never_steps_is_not_waited_for_after_eight_turns() -> None:
    rule = StepRule({"A", "idle"})
    for number in range(1, PATIENCE_TURNS):
        assert not rule.ends_at("A", has_forward=True), number
    assert rule.ends_at("A", has_forward=True)
    assert (rule.num_steps, rule.cycle) == (PATIENCE_TURNS, {"A"})  # each of its turns was a step
    assert rule.ends_at("A", has_forward=True)
    assert rule.num_steps == PATIENCE_TURNS + 1


def test_one_that_was_made_later_joins_by_a_new_look() -> None:
    rule = StepRule({"A"})
    for _ in range(MAX_STRAY_TURNS):
        assert rule.ends_at("A", has_forward=True)
        assert not rule.ends_at("B", has_forward=True)
    assert (rule.is_lost, rule.num_missed) == (True, 0)


# Each case that a loop can be, with real optimizers. The model is one square layer without bias.
WIDTH, BATCH, STEPS = 8, 4, 9
LAYER = 2 * BATCH * WIDTH * WIDTH


class Loop:
    """The parts of a loop, and what most of them do in a step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def backward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(BATCH, WIDTH)).square().mean()
        loss.backward()
        return loss

    def plain(self) -> None:
        for _ in range(STEPS):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def accumulation(self) -> None:
        for _ in range(STEPS):
            self.backward()
            self.backward()
            self.optimizer.step()

    def nested_steps(self) -> None:
        class Noisy(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                return super().step(closure)

        self.optimizer = Noisy(self.model.parameters(), lr=0.01)
        self.plain()

    def closure(self) -> None:
        self.optimizer = torch.optim.LBFGS(self.model.parameters(), lr=0.01, max_iter=2)
        for _ in range(STEPS):
            self.optimizer.step(self.backward)

    def scheduler(self) -> None:
        schedule = StepLR(self.optimizer, 2)
        for _ in range(STEPS):
            self.backward()
            self.optimizer.step()
            schedule.step()

    def step_that_raises(self) -> None:
        for index in range(STEPS + 1):
            self.backward()
            try:
                self.optimizer.step(None if index != 4 else {}.popitem)
            except KeyError:
                continue

    def skipped_by_a_scaler(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for index in range(STEPS):
            loss = self.model(torch.ones(BATCH, WIDTH)).square().mean()
            scaler.scale(loss * (float("inf") if index in (0, 5) else 1.0)).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.optimizer.zero_grad()

    def copied_optimizer(self) -> None:
        self.optimizer = copy.deepcopy(self.optimizer)
        self.optimizer.param_groups[0]["params"] = list(self.model.parameters())
        self.plain()

    def wrapper_without_init(self) -> None:
        class Wrapper(torch.optim.Optimizer):
            def __init__(self, inner: torch.optim.Optimizer) -> None:
                self.inner = inner

            @property
            def param_groups(self) -> Any:  # type: ignore[override]
                return self.inner.param_groups

            def step(self, closure: Any = None) -> Any:
                return self.inner.step(closure)

            def zero_grad(self, set_to_none: bool = True) -> None:
                self.inner.zero_grad(set_to_none)

        self.optimizer = Wrapper(self.optimizer)
        self.plain()

    def new_optimizer_every_third_step(self) -> None:
        self.new_optimizer_every_step(every=3)

    def new_optimizer_every_step(self, every: int = 1) -> None:
        for index in range(STEPS):
            if index % every == 0:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
            self.backward()
            self.optimizer.step()

    def in_backward(self) -> None:
        optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in self.model.parameters()}
        handles = [
            parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
            for parameter, optimizer in optimizers.items()
        ]
        for _ in range(STEPS):
            self.backward()
        for handle in handles:  # a cycle through C++, which no collector sees
            handle.remove()

    def grad_without_backward(self) -> None:
        for _ in range(STEPS):
            loss = self.model(torch.ones(BATCH, WIDTH)).square().mean()
            for parameter, grad in zip(
                self.model.parameters(), torch.autograd.grad(loss, list(self.model.parameters())), strict=True
            ):
                parameter.grad = grad
            self.optimizer.step()

    def warm_up_step_without_gradients(self) -> None:
        self.optimizer.step()
        self.plain()

    def idle_optimizer(self) -> None:
        self.idle = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        for _ in range(2):
            self.plain()

    def evaluation_between(self) -> None:
        for _ in range(3):
            for _ in range(STEPS // 3):
                self.backward()
                self.optimizer.step()
            with torch.no_grad():
                self.model(torch.ones(BATCH, WIDTH))

    def called_inside_a_frameworks_module(self) -> None:
        class Framework(nn.Module):
            def __init__(self, model: nn.Module) -> None:
                super().__init__()
                self.inner = nn.ModuleDict({"model": model})

            def training_step(self) -> torch.Tensor:
                loss: torch.Tensor = self.inner["model"](torch.ones(BATCH, WIDTH)).square().mean()
                return loss

        framework = Framework(self.model)
        for _ in range(STEPS):
            framework.training_step().backward()
            self.optimizer.step()


MEASURED = [name for name in vars(Loop) if not name.startswith("_") and name != "backward"]
ROUNDS = {"accumulation": 2, "closure": 2}
NUM_STEPS = {"idle_optimizer": 2 * STEPS}


@pytest.fixture
def measure(tmp_path: Path) -> Iterator[Callable[[Callable[[], None]], Run]]:
    """Measures what a function trains, as `flopmeter run` does in a program of its own."""
    program = Program(str(tmp_path / "record"), {"monitoring": {"peak_flop_per_s": 1e12, "sinks": []}}, True)
    gc.collect()  # optimizers of other tests are not this program's
    program.follow()

    def measured(train: Callable[[], None]) -> Run:
        train()
        program.finish()
        return load_run(tmp_path / "record")

    yield measured
    program.finish()


def test_an_optimizer_that_the_program_lets_go_is_gone(measure: Callable[[Callable[[], None]], Run]) -> None:
    found: list[Any] = []

    def train() -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())  # its state is twice the model
        for _ in range(10):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        found.append(weakref.ref(optimizer))
        del optimizer
        gc.collect()
        found.append(found[0]())

    assert len(measure(train)) == 8  # two steps to understand the loop
    assert found[1] is None


@pytest.mark.parametrize("name", MEASURED)
def test_steps_and_flop_are_right_whatever_the_loop_looks_like(measure: Any, name: str) -> None:
    loop = Loop()
    run = measure(getattr(loop, name))
    assert name == "idle_optimizer" or run.step[0] == 3  # two steps to understand the loop
    assert run.step[-1] == NUM_STEPS.get(name, STEPS)
    # One layer forward, its weights backward: no gradient flows into the input.
    assert run.column("perf/model_flop")[-1] == 2 * LAYER * ROUNDS.get(name, 1)


def test_an_evaluation_of_averaged_weights_is_a_pause_and_no_work_of_a_step(measure: Any) -> None:
    loop = Loop()
    average = copy.deepcopy(loop.model)  # no module that is trained: nothing is hooked
    rows = torch.ones(5 * BATCH, WIDTH)
    training, held_out = (DataLoader(TensorDataset(rows), BATCH) for _ in range(2))

    def train() -> None:
        for _ in range(3):
            for (batch,) in training:
                loop.model(batch).square().mean().backward()
                loop.optimizer.step()
            with torch.no_grad():
                for (batch,) in held_out:
                    average(batch)

    run = measure(train)
    assert [event["after_step"] for event in run.events if event.get("name") == "eval"] == [5, 10, 15]
    # The sixth step is to be measured, in which the evaluation falls: another one is.
    assert set(run.column("perf/model_flop")) == {2 * LAYER}


def test_a_second_loader_that_every_step_asks_more_than_once_is_no_evaluation(measure: Any) -> None:
    loop = Loop()
    first, second = (DataLoader(TensorDataset(torch.ones(2 * STEPS * BATCH, WIDTH)), BATCH) for _ in range(2))

    def train() -> None:
        ones, twos = iter(first), iter(second)
        for _ in range(STEPS):
            batch = torch.cat([*next(twos), *next(twos), *next(ones)])
            loop.model(batch).square().mean().backward()
            loop.optimizer.step()

    run = measure(train)
    warm_up = 2 + 3  # two steps to understand the loop
    assert all(event["after_step"] < warm_up for event in run.events if event.get("name") == "eval")


def test_a_step_that_fills_the_optimizers_state_before_the_training_is_none(measure: Any) -> None:
    loop = Loop()
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.01)
    for parameter in loop.model.parameters():  # as torch.distributed.checkpoint does before it loads a state
        parameter.grad = torch.zeros_like(parameter)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    assert list(measure(loop.plain).step) == list(range(3, STEPS + 1))


def test_a_loop_that_updates_by_hand_is_told_what_to_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    backward, grad = torch.autograd.backward, torch.autograd.grad
    program = Program(str(tmp_path / "record"), {}, False)
    program.follow()
    model = nn.Linear(WIDTH, WIDTH)
    for _ in range(7):
        model(torch.ones(BATCH, WIDTH)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
        model.zero_grad()
    program.finish()
    said = capsys.readouterr().err
    assert "7 backward passes and no step of a torch optimizer" in said
    assert "monitor = flopmeter.watch(model)" in said
    assert "monitor.log_step(step)" in said
    assert said.count("\n") == 1
    assert (torch.autograd.backward, torch.autograd.grad) == (backward, grad)


def test_skipped_steps_are_told_in_the_record(measure: Any) -> None:
    run = measure(Loop().skipped_by_a_scaler)
    assert [event["event"] for event in run.events].count("skipped_step") == 1  # the other came before we were attached


def test_something_else_that_is_trained_later_has_a_record_of_its_own(measure: Any, tmp_path: Path) -> None:
    def train() -> None:
        Loop().plain()
        second = Loop()
        second.model = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        second.optimizer = torch.optim.SGD(second.model.parameters(), lr=0.01)
        second.plain()
        second.plain()

    first = measure(train)
    assert first.step[-1] == STEPS
    second = load_run(tmp_path / "record-2")
    assert second.step[-1] == 2 * STEPS
    assert second.column("perf/model_flop")[-1] == 4 * LAYER


def test_a_training_that_begins_after_a_single_step_of_another_is_measured(measure: Any) -> None:
    def train() -> None:
        trial = Loop()
        trial.backward()
        trial.optimizer.step()
        loop = Loop()  # made when all optimizers and modules have been looked at
        loop.plain()
        loop.plain()

    run = measure(train)
    assert run.step[-1] == 2 * STEPS
    assert run.column("perf/model_flop")[-1] == 2 * LAYER


def test_one_that_had_a_few_steps_and_never_another_is_not_waited_for_for_ever(measure: Any) -> None:
    pair, num_alone = Pair(), MAX_TURNS_APART + 20

    def train() -> None:
        for _ in range(3):
            pair.step_first()
        for _ in range(num_alone):
            pair.step_second()

    run = measure(train)
    assert run.step[-1] == num_alone
    assert run.column("perf/model_flop")[-1] == 3 * LAYER  # forward of both, and the second's weights


def test_optimizers_of_trainings_that_are_over_are_not_waited_for(measure: Any, tmp_path: Path) -> None:
    folds: list[Loop] = []  # kept, as by references in a circle

    def train() -> None:
        for _ in range(4):
            folds.append(Loop())
            for _ in range(MAX_STRAY_TURNS + 5):
                folds[-1].backward()
                folds[-1].optimizer.step()

    measure(train)
    for number in (3, 4):
        # The eighth stray turn is the first to be learned from, the ninth shows what a step is.
        assert list(load_run(tmp_path / f"record-{number}").step) == [10, 11, 12, 13]


def test_the_last_line_says_when_there_were_more_trainings_than_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flopmeter.integrations.script.MAX_RECORDS", 2)
    gc.collect()
    program = Program(str(tmp_path / "record"), {"monitoring": {"peak_flop_per_s": 1e12, "sinks": []}}, False)
    program.follow()
    for _ in range(3):
        loop = Loop()
        loop.plain()
        loop.plain()
    program.finish()
    assert capsys.readouterr().err.endswith("(the last of 2 trainings; those after it were not measured)\n")
    assert {folder.name for folder in tmp_path.iterdir()} == {"record", "record-2"}


def test_a_loop_that_calls_no_module_has_its_steps_timed(measure: Any) -> None:
    weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def train() -> None:
        for _ in range(TURNS_WITHOUT_MODULE + 5):
            (torch.ones(BATCH, WIDTH) @ weight).square().mean().backward()
            optimizer.step()

    run = measure(train)
    assert list(run.step) == [TURNS_WITHOUT_MODULE + n for n in range(1, 6)]
    assert all(step_s > 0 for step_s in run.column("perf/step_time"))
    assert "perf/model_flop" not in run.columns


class Pair:
    """Two networks, each with its optimizer."""

    def __init__(self) -> None:
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.first, self.second)]

    def step_first(self) -> None:
        self.first(torch.ones(BATCH, WIDTH)).square().mean().backward()
        self.optimizers[0].step()

    def step_second(self) -> None:
        self.second(self.first(torch.ones(BATCH, WIDTH)).detach()).square().mean().backward()
        self.optimizers[1].step()


def test_an_optimizer_that_goes_on_alone_is_measured_anew(measure: Any, tmp_path: Path) -> None:
    pair, num_alone = Pair(), MAX_TURNS_APART + 20

    def train() -> None:
        for _ in range(STEPS):
            pair.step_first()
            pair.step_second()
        for _ in range(num_alone):
            pair.step_first()

    assert measure(train).step[-1] == STEPS
    assert load_run(tmp_path / "record-2").step[-1] == num_alone


def test_a_network_that_joins_later_is_counted(measure: Any, tmp_path: Path) -> None:
    pair = Pair()

    def train() -> None:
        for index in range(40):
            pair.step_first()
            if index >= 15:
                pair.step_second()

    measure(train)
    # First: forward and weights. Second: forward of both, and the second's weights.
    assert load_run(tmp_path / "record-2").column("perf/model_flop")[-1] == pytest.approx(5 * LAYER)


def test_two_networks_of_one_agent_are_named_after_it_and_counted_together(measure: Any) -> None:
    class Agent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 1)
            self.ema = copy.deepcopy(self.actor).requires_grad_(False)
            self.critic.bias.requires_grad_(False)

    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(STEPS):
            batch = torch.ones(BATCH, WIDTH)
            (agent.actor(batch).square().mean() + agent.critic(batch).square().mean()).backward()
            optimizer.step()

    header = measure(train).header
    assert (header.model, header.num_parameters) == ("Agent", (WIDTH + 1) * 3 + (WIDTH + 1) * 1)
    assert header.num_trainable == header.num_parameters - 1  # the critic's bias is frozen


def test_a_compiled_model_is_found_by_its_wrapper_and_stays_compiled(measure: Any) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    loop = Loop()
    loop.model = torch.compile(loop.model, backend=backend)
    run = measure(loop.plain)
    assert run.header.model == "Sequential"
    assert run.step[-1] == STEPS
    assert len(graphs) == 1


def test_the_outermost_called_modules_are_found() -> None:
    generator, critic = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 1))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, critic)]
    frozen = nn.Linear(2, 2)
    found = owners(parameters_of(optimizers), live().modules)
    assert {generator, generator[0], critic, critic[0]} <= set(found)
    assert frozen not in found
    calls = Calls(found, lambda: None)
    critic(generator(frozen(torch.rand(1, 2)))).sum().backward()
    calls.remove()
    assert calls.models == [generator, critic]
    assert not generator._forward_pre_hooks
    assert not critic[0]._forward_hooks


def test_an_optimizer_made_anew_for_the_same_parameters_has_the_same_key() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert key_of(torch.optim.SGD(parameters, lr=1.0)) == key_of(torch.optim.Adam(parameters))


def test_losses_are_bit_for_bit_the_same(measure: Any) -> None:
    plain, watched = Loop(), Loop()
    plain.plain()
    measure(watched.plain)
    assert torch.equal(plain.model[0].weight, watched.model[0].weight)


def test_a_mistake_of_ours_ends_the_measuring_and_not_the_program(
    measure: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(TrainingMonitor, "start_training", broken)
    loop = Loop()
    loop.plain()
    assert caplog.text.count("switched off") == 1
    assert "disk full" in caplog.text
    assert not loop.model._forward_pre_hooks


@pytest.mark.parametrize(
    ("mfu", "num_before", "num_steps", "line"),
    [
        (0.4357, 2, 48, "MFU 43.6 %, counted, 212 ms per step (median), 48 of 50 steps measured; run: runs/a"),
        (0.4357, 0, 50, "MFU 43.6 %, counted, 212 ms per step (median), 50 steps; run: runs/a"),
        (None, 0, 1, "MFU unknown (too few steps), 1 step; run: runs/a"),
        (None, 2, 1, "MFU unknown (too few steps), 1 of 3 steps measured; run: runs/a"),
    ],
)
def test_the_closing_line_counts_and_spells_as_the_report_does(
    mfu: float | None, num_before: int, num_steps: int, line: str
) -> None:
    summary = {"perf/mfu": mfu} if mfu is None else {"perf/mfu": mfu, "step_time_median_s": 0.212}
    session = Training.__new__(Training)
    session._loaders = SimpleNamespace(remove=lambda: None)  # type: ignore[assignment]
    session._calls = SimpleNamespace(models=[1], remove=lambda: None)  # type: ignore[assignment]
    session.monitor = SimpleNamespace(  # type: ignore[assignment]
        finish_training=lambda: summary, num_steps=num_steps, output_dir="runs/a",
        run=SimpleNamespace(has_record=True, trace_hint=""),
    )  # fmt: skip
    session._num_before = num_before
    assert session.finish() == line
