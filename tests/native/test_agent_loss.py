"""When the agent dies, its workers end.

With Python stuck, with children, and only their own process group.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from taskd.native import library
from taskd.native.black_box import BlackBox
from tests.native.programs import (
    GUARD,
    PRELUDE,
    READ,
    ending,
    environment,
    expect,
    is_readable,
    read_line,
    start,
    wait_for_end,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here"),
]

# The agent: holds the only write end of the life pipe, starts one worker in a session of its own,
# and waits to be killed.
AGENT = """
import os, subprocess, sys
from taskd.native.black_box import BlackBox
box = BlackBox.create()
life_read, life_write = os.pipe()
worker = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1], str(box.fd), str(life_read)],
    pass_fds=[box.fd, life_read], start_new_session=True,
)
worker.wait()
"""

# A child as a data loader has it: forked, in the worker's group, with all its descriptors.
FORK = (
    "child = os.fork()\nif child == 0:\n    while True: signal.pause()\nsay(os.getpid(), child)\n"
)


def start_agent(worker_body):
    return subprocess.Popen(
        [sys.executable, "-c", AGENT, PRELUDE + worker_body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
    )


@pytest.mark.parametrize("end_of_worker", ["hold_the_gil_for_ever()", "signal.pause()"])
def test_a_killed_agent_takes_the_worker_and_its_children_with_it(end_of_worker):
    agent = start_agent(GUARD + FORK + end_of_worker)
    with ending(agent):
        expect(agent, "guarded True")
        pidfds = [os.pidfd_open(int(pid)) for pid in read_line(agent).split()]
        agent.kill()
        for pidfd in pidfds:
            wait_for_end(pidfd)
            os.close(pidfd)
        assert "the agent of this worker is gone" in agent.stderr.read()
        agent.stderr.close()


def test_a_group_that_ignores_sigterm_is_killed_after_the_grace():
    agent = start_agent(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GUARD + FORK + "hold_the_gil_for_ever()"
    )
    with ending(agent):
        expect(agent, "guarded True")
        pidfds = [os.pidfd_open(int(pid)) for pid in read_line(agent).split()]
        before = time.monotonic()
        agent.kill()
        for pidfd in pidfds:
            wait_for_end(pidfd)
            os.close(pidfd)
        assert time.monotonic() - before >= 4.9, "SIGTERM comes first, and its handlers have 5 s"
        agent.stderr.close()


def test_a_worker_with_a_handler_can_say_goodbye():
    body = (
        "signal.signal(signal.SIGTERM, lambda *_: (say('saved'), os._exit(0)))\n"
        + GUARD
        # a signal just before a pause() has its handler called behind that one
        + "while True: time.sleep(0.05)"
    )
    agent = start_agent(body)
    with ending(agent):
        expect(agent, "guarded True")
        agent.kill()
        expect(agent, "saved")
        agent.stderr.close()


def test_a_worker_that_does_not_lead_its_group_ends_alone():
    box = BlackBox.create()
    life_read, life_write = os.pipe()
    sibling = subprocess.Popen(["sleep", "600"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    worker = start(
        GUARD + "signal.pause()",
        box.fd,
        life_read,
        start_new_session=False,
        stderr=subprocess.DEVNULL,
    )
    os.close(life_read)
    with ending(worker, sibling):
        expect(worker, "guarded True")
        assert os.getpgid(worker.pid) == os.getpgrp() != worker.pid, (
            "it is in the group of this test"
        )
        os.close(life_write)
        assert worker.wait(30) == -signal.SIGTERM
        assert sibling.poll() is None
    box.close()


def test_a_program_that_closes_unknown_descriptors_is_not_ended_for_it():
    box = BlackBox.create()
    life_read, life_write = os.pipe()
    # The numbers come back as ends of a pipe that hangs up at once: the guard must see that it is
    # not its pipe.
    reuse = """
os.closerange(3, 64)
for _ in range(20):
    read, write = os.pipe()
    os.dup2(read, write)
say('reused')
"""
    worker = start(GUARD + reuse + READ + "say('alive')\n" + READ, box.fd, life_read)
    os.close(life_read)
    with ending(worker):
        expect(worker, "guarded True")
        expect(worker, "reused")
        os.close(life_write)
        seen = box.alive_at
        wait_until(lambda: box.alive_at > seen + 0.3, "three more rounds of the guard")
        worker.stdin.write("go\n")
        worker.stdin.flush()
        expect(worker, "alive")
        assert not is_readable(worker.stdout.fileno(), 0)
    box.close()


def test_without_the_library_a_thread_ends_the_process_group():
    body = """
from taskd.native.death_alarm import end_own_process_group
child = os.fork()
if child == 0:
    while True: signal.pause()
say(child)
sys.stdin.readline()
threading.Thread(target=end_own_process_group, daemon=True).start()
signal.pause()
"""
    box = BlackBox.create()
    worker = start(body, box.fd, stderr=subprocess.DEVNULL)
    with ending(worker):
        pidfd = os.pidfd_open(int(read_line(worker)))
        worker.stdin.write("go\n")
        worker.stdin.flush()
        wait_for_end(pidfd)
        assert worker.wait(30) == -signal.SIGTERM
        os.close(pidfd)
    box.close()
