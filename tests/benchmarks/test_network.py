"""The slow network of the benchmarks: what it says where it cannot be made, and, as root, that it is made, used and removed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import network
from network import NetworkError, SlowNetwork
from tests.full import examples

SLEEP = f"1{os.getpid():07d}"  # how a rank of these tests is found among all processes


@pytest.fixture
def possible():
    """Skips where no network can be made."""
    try:
        with SlowNetwork(1):
            return
    except NetworkError as error:
        pytest.skip(str(error))


def _sleepers() -> list[str]:
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes()
        except OSError:
            continue
        if words == f"sleep\0{SLEEP}\0".encode():
            found.append(line.parent.name)
    return found


def _busy(parent):
    """The processes below one that do nothing but keep a core busy."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    command = f"{sys.executable}\0-c\0{network._BUSY}\0".encode()
    return [child for child in children if Path(f"/proc/{child}/cmdline").read_bytes() == command]


_LOOK = """
import os
from tests.benchmarks.test_network import _busy, _until
assert _until(lambda: _busy(os.getppid()))
print(*(str(sorted(os.sched_getaffinity(int(child)))).replace(" ", "") for child in _busy(os.getppid())))
"""


def _until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize(("rate", "bits"), [("200mbit", 2e8), ("1gbit", 1e9), ("1.5kbit", 1500.0)])
def test_rate(rate, bits):
    assert network.parse_rate(rate) == bits


@pytest.mark.parametrize("rate", ["", "200", "0mbit", "1 gbit", "1gbps"])
def test_a_rate_that_tc_would_take_otherwise_is_refused(rate):
    with pytest.raises(NetworkError, match="for example 200mbit"):
        SlowNetwork(2, rate)


def test_ideal_of_the_literature():
    assert network.ideal_seconds(10_000_000, 2, 1e9) == pytest.approx(0.08)
    assert network.ideal_seconds(10_000_000, 4, 1e9) == pytest.approx(0.12)


def test_who_is_not_root_is_told(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program, **_: program)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="needs root"), SlowNetwork(2):
        pass


def test_a_missing_program_is_named_by_its_package(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda program, **_: None if program == "tc" else program)
    with pytest.raises(NetworkError, match="programs of iproute2: install"), SlowNetwork(2):
        pass


@pytest.mark.usefixtures("possible")
def test_every_host_has_a_name_and_every_rank_a_place():
    with SlowNetwork(2, "1gbit") as hosts:
        done = hosts.run(["sh", "-c", "echo $(cat /proc/sys/kernel/hostname) $RANK $LOCAL_RANK $WORLD_SIZE"], os.environ, 2)
    assert done.code == 0
    assert sorted(done.output.splitlines()) == ["host0 0 0 4", "host0 1 1 4", "host1 2 0 4", "host1 3 1 4"]


@pytest.mark.usefixtures("possible")
def test_a_rank_that_fails_ends_the_others():
    with SlowNetwork(2, "1gbit") as hosts:
        done = hosts.run(["sh", "-c", f'[ "$RANK" = 1 ] && exit 3; exec sleep {SLEEP}'], os.environ)
    assert done.code == 3
    assert not _sleepers()


@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number):
    program = f"""
import os, signal
from network import SlowNetwork
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in what a shell starts with &
with SlowNetwork(2) as network:
    network.run(["sleep", "{SLEEP}"], os.environ)
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(network.__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, stderr=subprocess.DEVNULL)
    assert _until(lambda: len(_sleepers()) == 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 5, "two hosts, the switch, two ranks"
    process.send_signal(number)
    process.wait(timeout=10)
    assert _until(lambda: not any(Path("/proc", child).exists() for child in children))


@pytest.mark.slow
@pytest.mark.usefixtures("possible")
@pytest.mark.parametrize("launcher", examples(["mpi"], ["torch", "mpi"]))
def test_ranks_sum_over_the_link(launcher):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with SlowNetwork(2, "1gbit") as hosts:
        seconds = network.measure_sum(hosts, 100_000, environ, launcher=launcher)  # each rank sees that it is a node of its own
    assert len(seconds) == 5


@pytest.mark.parametrize(
    ("hosts", "cores", "shares", "free"),
    [
        (4, [2, 5], [[2], [5], [2], [5]], []),
        (2, [2, 3, 5, 7], [[2, 3], [5, 7]], []),
        (3, [2, 3, 5, 7], [[2], [3], [5]], []),
        (3, [2, 5], [[2], [5], [2]], [5]),
        (5, [2, 5, 7], [[2], [5], [7], [2], [5]], [7]),
    ],
)
def test_hosts_share_the_cores_equally(hosts, cores, shares, free):
    assert [network.cores_of(host, hosts, cores) for host in range(hosts)] == shares
    assert network.free_places(hosts, cores) == free


@pytest.mark.usefixtures("possible")
def test_a_place_that_no_host_takes_is_kept_busy():
    """Or hosts beside it would be faster than the others; and no longer than the job."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("one core has no free place")
    with SlowNetwork(2 * len(cores) - 1, rate=None) as hosts:
        done = hosts.run([sys.executable, "-c", _LOOK], {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        assert done.output.split() == [f"[{cores[-1]}]"] * hosts.hosts
        assert not _busy(os.getpid())


def test_a_host_stays_on_its_cores(possible):
    cores = sorted(os.sched_getaffinity(0))
    with SlowNetwork(2 * len(cores), rate=None) as hosts:
        done = hosts.run([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"], os.environ)
    assert sorted(done.output.split("\n")) == sorted(["", *(f"[{core}]" for core in cores * 2)])
