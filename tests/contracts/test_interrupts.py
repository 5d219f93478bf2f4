"""Ctrl-C ends every command with one line and exit code 130, at whatever moment it comes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paper import paper_regressor

import keyhole as kh

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals as POSIX has them")
SOURCE = Path(kh.__file__).parent

# the signal is held back until our first line has run: what Python does before that is not ours
START = (
    "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); "
    "sys.stdout.write('up\\n'); sys.stdout.flush(); from keyhole.__main__ import main; main()"
)


@pytest.fixture
def folder(tmp_path):
    """A table, and a model that reads it."""
    sets = kh.targets.sphere_sets(200, n_keys=3, dim=2, seed=0)
    kh.data.write_parquet(tmp_path / "in.parquet", [(sets, sets.query[:, 0])], row_group_size=10)
    model = paper_regressor(6, alpha=1.0, random_state=0)
    kh.save(model.fit(sets, sets.query[:, 0]), tmp_path / "model")
    return tmp_path


COMMANDS = {
    "fit": ("fit", "in.parquet", "new", "--overwrite"),
    "predict": (
        "predict",
        "model",
        "in.parquet",
        "out",
        "--interval",
        "0.9",
        "--overwrite",
    ),
    "explain": ("explain", "model", "in.parquet", "--set", "0"),
    "lens": ("lens", "in.parquet", "--no-report"),
    "theory": ("theory", "--target", "rotated(0.5)^3 * token"),
    "reproduce": ("reproduce", "averages", "--set", "d=8"),
    "heads": ("heads", "model"),
    "export": ("export", "model", "out.onnx", "--overwrite"),
    "explore": ("explore", "--no-browser"),
}

BEFORE_AN_INTERRUPT = ("keyhole: compiling", "error: ", "Open it in a browser")
"""How lines begin that a command may have printed before it was interrupted."""


def interrupted(folder, arguments, delay):
    """Start a command, send it Ctrl-C after a while; its exit code and what it said."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE.parent)}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", START, *arguments]
    with subprocess.Popen(
        command, **pipes, env=environment, cwd=folder, start_new_session=True
    ) as process:
        assert process.stdout.readline() == b"up\n"
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(
                process.pid, signal.SIGINT
            )  # a terminal sends it to all processes of a command
        out, err = process.communicate(timeout=120)
    return process.returncode, out.decode(), err.decode()


def check_interrupt(folder, name, delay):
    """One line and 130, or, where the command had ended before, what it says of its own accord."""
    code, out, err = interrupted(folder, COMMANDS[name], delay)
    if code in (0, 2) and "interrupted" not in err:
        return False
    lines = [line for line in err.splitlines() if not line.startswith(BEFORE_AN_INTERRUPT)]
    assert code == 130, (delay, code, out, err)
    assert len(lines) == 1, (delay, out, err)
    assert lines[0].startswith(("interrupted", "stopped")), (delay, out, err)
    return True


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.4])
def test_an_interrupt_while_a_command_starts(delay, tmp_path):
    was_interrupted = check_interrupt(tmp_path, "theory", delay)
    assert was_interrupted or delay > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_interrupts_at_many_moments(name, folder):
    """Whatever a command is doing; nothing is half written."""
    delays = [0.05 * k for k in range(31)]
    count = sum(check_interrupt(folder, name, delay) for delay in delays)
    assert count > 3
    assert not [path for path in folder.rglob("*") if path.name.endswith((".partial", ".draft"))]


COMMAND = """
import os, signal, sys, time, types
import keyhole.__main__ as entry

def command():
{body}

sys.modules["keyhole.cli"] = types.ModuleType("keyhole.cli")
sys.modules["keyhole.cli"].main = command
entry.main()
"""


def run_command(body):
    """The entry point with another command: exit code, and what it said."""
    code = COMMAND.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


PRESS = "os.kill(os.getpid(), signal.SIGINT)"
WORK = "for _ in range(3000): time.sleep(0.01)"


def test_what_a_command_has_begun_is_unwound():
    body = f"try:\n    {PRESS}\n    {WORK}\nfinally:\n    time.sleep(0.1)\n    print('removed')"
    assert run_command(body) == (130, "removed\n", "interrupted.\n")


def test_an_interrupt_while_python_takes_itself_down():
    """Without care the process dies of the signal, code -2, though all is done."""
    body = (
        "class Last:\n"
        "    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGINT):\n"
        "        kill(process, number)\n"
        # what sys.modules holds is destroyed after the callbacks of atexit and the handlers
        "sys.modules['last'] = Last()\n"
        "print('done')"
    )
    assert run_command(body) == (0, "done\n", "")


def test_a_process_that_was_told_to_ignore_interrupts_does():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + COMMAND.format(
        body=f"    {PRESS}\n    time.sleep(0.05)\n    print('done')"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
