"""Child processes: they die with their parent, and what a killed role left behind is found by its mark and ended."""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from megatron_webrl.processes import MARK, marked, reap, spawn

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]


@pytest.fixture
def mark():
    """A mark of this test's own, of which nothing is left afterwards."""
    run = f"test-{uuid.uuid4().hex[:8]}"
    yield run
    reap(run)
    assert marked(run) == []


def wait_for(condition, timeout: float = 20.0):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.02)
    return value


def test_output_goes_to_the_log_and_the_environment_is_passed(mark: str, tmp_path: Path):
    """stdout and stderr are appended to the log; the child has the mark and what it was given, and no stdin."""
    log = tmp_path / "child.log"
    log.write_text("before\n")
    code = (
        f"import os, sys; print(os.environ['{MARK}'], os.environ['COLOUR']); sys.stderr.write(repr(sys.stdin.read()))"
    )
    child = spawn([sys.executable, "-S", "-c", code], mark=f"{mark}/role", log=log, env={"COLOUR": "green"})
    assert child.wait(20) == 0
    text = log.read_text()
    assert text.startswith("before\n")
    assert f"{mark}/role green" in text
    assert "''" in text


def test_child_is_a_session_of_its_own(mark: str):
    """A Ctrl-C at the terminal does not reach it: its session and group are its own."""
    child = spawn(SLEEP, mark=mark)
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid != os.getsid(0)


def test_reap_ends_the_whole_family(mark: str):
    """Grandchildren with another parent and session are found by the mark; those of other marks are left alone."""
    code = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:], start_new_session=True); time.sleep(60)"
    spawn([sys.executable, "-S", "-c", code, *SLEEP], mark=f"{mark}/worker")
    other = spawn(SLEEP, mark=f"{mark}x/worker")
    try:
        wait_for(lambda: len(marked(mark)) == 2)
        assert len(marked(f"{mark}/worker")) == 2
        assert marked(f"{mark}/work") == []
        assert reap(mark) == 2
        assert marked(mark) == []
        assert other.poll() is None
        assert reap(mark) == 0
    finally:
        assert reap(f"{mark}x") == 1


def test_reap_gives_grace(mark: str, tmp_path: Path):
    """With a grace, SIGTERM comes first: a process that handles it ends in its own way; one that ignores it is killed."""
    ready = "print('ready', flush=True); time.sleep(60)"
    polite = f"import signal, sys, time; signal.signal(15, lambda *_: sys.exit('said goodbye')); {ready}"
    rude = f"import signal, time; signal.signal(15, signal.SIG_IGN); {ready}"
    for name, code in (("polite", polite), ("rude", rude)):
        spawn([sys.executable, "-S", "-c", code], mark=mark, log=tmp_path / name)
    wait_for(lambda: all((tmp_path / name).read_text() for name in ("polite", "rude")))
    began = time.monotonic()
    reap(mark, grace_s=5.0)
    assert time.monotonic() - began < 20
    assert "said goodbye" in (tmp_path / "polite").read_text()
    assert (tmp_path / "rude").read_text() == "ready\n"
    assert marked(mark) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_child_dies_with_a_killed_parent(mark: str):
    """kill -9 of the parent takes the child with it: nobody has to clean up."""
    code = (
        "import sys, time\nfrom megatron_webrl.processes import spawn\n"
        f"print(spawn({SLEEP!r}, mark={mark!r}).pid, flush=True)\ntime.sleep(60)"
    )
    root = Path(__file__).parents[1]
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root)
    assert parent.stdout is not None
    with parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    wait_for(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
