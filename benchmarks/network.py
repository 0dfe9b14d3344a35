"""A slow network on one machine: hosts with names and links of their own, at the rate that you choose.

    with SlowNetwork(hosts=2, rate="200mbit") as network:
        done = network.run([sys.executable, "-m", "deepex", "train", "fashion", "--set", "comm=gloo"], os.environ)
        print(done.code, done.output)

    python benchmarks/network.py --hosts 2 --rate 1gbit     # how true the link is: an all-reduce against its ideal

Each host is a network namespace, with a UTS namespace that gives it a name, so that DeepEx and MPI take it for a node of its own. A
veth pair joins it to a bridge, which has a namespace to itself; a token bucket (tc's tbf) at each end of the pair limits both
directions. So the host pays as on a real link: packets, TCP and its congestion control are the kernel's own. What the hosts share
is the machine: cores, memory, files. The limit is one of rate alone; the latency is that of the machine.

Nothing here has a name outside: a namespace lives as long as a process in it, and the one that holds it (`cat`) ends when its
standard input closes. So nothing can be left behind, however this process ends; its ranks are killed with it (setpriv). It needs
root, Linux, and the packages iproute2 and util-linux.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import TracebackType
from typing import Any, Final, Literal, Self, final

_PROGRAMS: Final = {"ip": "iproute2", "tc": "iproute2"} | dict.fromkeys(("nsenter", "setpriv", "taskset", "unshare"), "util-linux")
_INTERFACE: Final = "net0"
_UNITS: Final = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# Large enough for a segment of 64 KiB and the timer's grain, small enough that a message of some megabytes cannot hide in it.
_BUCKET: Final = ("burst", "256kb", "latency", "50ms")
_DIES_WITH_US: Final = ("setpriv", "--pdeathsig", "KILL", "--")  # before a command
_BUSY: Final = "while True: pass"
_PORT: Final = 29500  # free in any case: nothing else runs on these hosts
_READY_SECONDS: Final = 20.0

Launcher = Literal["torch", "mpi"]


class NetworkError(Exception):
    """The network cannot be made here, or a job on it cannot be started."""


@final
@dataclass(frozen=True, kw_only=True)
class Finished:
    """A job that has ended: the exit code of the first rank that failed, or 0, and what all ranks wrote."""

    code: int
    output: str


@final
class SlowNetwork:
    """`hosts` hosts on one switch, each with a link of `rate` ("1gbit", "200mbit") in both directions; None does not limit it."""

    def __init__(self, hosts: int = 2, rate: str | None = "1gbit") -> None:
        if hosts < 1:
            raise NetworkError(f"hosts is {hosts}; a network has at least 1")
        self.hosts, self.rate = hosts, rate
        self.bits_per_second = None if rate is None else parse_rate(rate)
        self._stack = ExitStack()
        self._switch, self._processes = 0, list[int]()  # the process that holds the switch, and that of each host

    def __enter__(self) -> Self:
        check_possible()
        with self._stack as stack:  # undone here if the network cannot be completed
            self._switch = self._hold(stack, "switch")
            self._in(self._switch, "ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0", "mcast_snooping", "0")
            self._in(self._switch, "ip", "link", "set", "bridge", "up")
            self._processes = [self._hold(stack, f"host{k}") for k in range(self.hosts)]
            for number, process in enumerate(self._processes):
                self._connect(number, process)
            self._wait_until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def address(self, host: int) -> str:
        """The address of a host, counted from 0."""
        return f"10.77.{(host + 1) // 256}.{(host + 1) % 256}"

    def run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        ranks_per_host: int = 1,
        *,
        launcher: Launcher = "torch",
        timeout: float = 600.0,
    ) -> Finished:
        """Run `command` as one job, host by host, and wait for it; one rank that fails, or `timeout` seconds, end the others.

        `torch` gives the ranks what torchrun would, for gloo, and keeps a host on its cores (`cores_of`); where three hosts share
        two cores, a fourth place is kept busy, so that no host is faster than another. `mpi` starts them by the mpiexec of the MPI
        that mpi4py loads.
        """
        with tempfile.TemporaryFile() as output, ExitStack() as stack:
            start = self._start_mpi if launcher == "mpi" else self._start_torch
            ranks = start(stack, list(command), environ, ranks_per_host, output)
            code = _wait(ranks, timeout)
            stack.close()
            output.seek(0)
            return Finished(code=code, output=output.read().decode(errors="replace"))

    def _start_torch(
        self, stack: ExitStack, command: list[str], environ: Mapping[str, str], per_host: int, output: Any
    ) -> list[subprocess.Popen[bytes]]:
        size, ranks, cores = self.hosts * per_host, [], sorted(os.sched_getaffinity(0))
        for core in free_places(self.hosts, cores):
            _start(stack, [*_DIES_WITH_US, "taskset", "-c", str(core), sys.executable, "-c", _BUSY], environ, output)
        for rank in range(size):
            host, local = divmod(rank, per_host)
            told = {
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": local,
                "LOCAL_WORLD_SIZE": per_host,
                "GROUP_RANK": host,
                "GROUP_WORLD_SIZE": self.hosts,
                "MASTER_ADDR": self.address(0),
                "MASTER_PORT": _PORT,
                "TORCHELASTIC_RUN_ID": "slow-network",
                "GLOO_SOCKET_IFNAME": _INTERFACE,
            }
            variables = {**environ, **{name: str(value) for name, value in told.items()}}
            own = ",".join(map(str, cores_of(host, self.hosts, cores)))
            ranks.append(_start(stack, [*_enter(self._processes[host]), "taskset", "-c", own, *command], variables, output))
        return ranks

    def _start_mpi(
        self, stack: ExitStack, command: list[str], environ: Mapping[str, str], per_host: int, output: Any
    ) -> list[subprocess.Popen[bytes]]:
        """Start MPICH's hydra on the first host; in place of ssh it gets a script that enters the host named by its address."""
        from deepex.comm.launch import launcher_prefix

        mpiexec, *more = launcher_prefix(1)[0]
        if more != ["-n", "1"]:
            raise NetworkError(f"{mpiexec} is Open MPI's, which is not started over a slow network here: use MPICH, or gloo")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deepex-")))
        script = folder / "enter"
        cases = "\n".join(
            f'{self.address(host)}) exec {shlex.join(_enter(process))} sh -c "$*" ;;'
            for host, process in enumerate(self._processes)
        )
        script.write_text(f'#!/bin/sh\n[ "$1" = -x ] && shift\nhost=$1\nshift\ncase $host in\n{cases}\nesac\n', encoding="ascii")
        script.chmod(0o700)
        hosts = ",".join(f"{self.address(host)}:{per_host}" for host in range(self.hosts))
        options = ["-launcher", "ssh", "-launcher-exec", str(script), "-hosts", hosts, "-iface", _INTERFACE]
        start = [*_enter(self._processes[0]), mpiexec, *options, "-n", str(self.hosts * per_host), *command]
        # Else UCX finds that all ranks are on one machine, and takes its memory for the network.
        return [_start(stack, start, {**environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": _INTERFACE}, output)]

    def _hold(self, stack: ExitStack, name: str) -> int:
        """Start the process whose namespaces are those of a host; it says when it is in them."""
        # A sysfs of its own, because UCX looks for interfaces there, and it shows those of whoever mounted it.
        inside = f"echo {name} >/proc/sys/kernel/hostname && mount -t sysfs host /sys && ip link set lo up && echo && exec cat"
        process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stack.callback(_end, process)
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            why = process.stderr.read().decode().strip()
            raise NetworkError(f"no host could be made: {why}; a container needs the rights to mount and to administer networks")
        return process.pid

    def _connect(self, number: int, process: int) -> None:
        port = f"port{number}"
        self._in(self._switch, "ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", str(process))
        self._in(self._switch, "ip", "link", "set", port, "master", "bridge", "addrgenmode", "none", "up")
        self._in(process, "ip", "address", "add", f"{self.address(number)}/16", "dev", _INTERFACE)
        self._in(process, "ip", "link", "set", _INTERFACE, "addrgenmode", "none", "up")
        if self.rate is not None:
            for where, device in ((self._switch, port), (process, _INTERFACE)):
                self._in(where, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", self.rate, *_BUCKET)

    def _wait_until_ready(self) -> None:
        """A new link takes up to some seconds to carry packets; a connection that is refused has gone there and back."""
        addresses = [self.address(host) for host in range(self.hosts)]
        for process in self._processes:
            self._in(process, sys.executable, "-c", _REACH, str(_READY_SECONDS), *addresses)

    def _in(self, process: int, *command: str) -> None:
        """Run a command in a host."""
        done = subprocess.run([*_enter(process), *command], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.strip().rpartition("\n")[2] or f"code {done.returncode}"
            raise NetworkError(f"the network could not be made: {command[0]} says {why!r}")


_REACH: Final = """
import socket, sys, time
until = time.monotonic() + float(sys.argv[1])
for address in sys.argv[2:]:
    while True:
        try:
            socket.create_connection((address, 9), timeout=0.2)
        except ConnectionRefusedError:
            break
        except OSError as error:
            if time.monotonic() > until:
                sys.exit(f"{address} cannot be reached: {error}")
            time.sleep(0.02)
"""


def check_possible() -> None:
    """Say in one sentence what is missing."""
    missing = sorted({package for program, package in _PROGRAMS.items() if shutil.which(program, path=_path(os.environ)) is None})
    if missing:
        raise NetworkError(f"a slow network needs the programs of {' and '.join(missing)}: install them (Debian: apt-get install)")
    if os.geteuid() != 0:
        raise NetworkError("a slow network needs root, to make network namespaces: run as root, for example in a container")


def parse_rate(rate: str) -> float:
    """Bits per second, from what tc takes: "200mbit"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]bit)", rate)
    if not match or float(match[1]) == 0:
        raise NetworkError(f"rate is {rate!r}; it must be a number and one of {', '.join(_UNITS)}, for example 200mbit")
    return float(match[1]) * _UNITS[match[2]]


def ideal_seconds(nbytes: int, hosts: int, bits_per_second: float) -> float:
    """How long the best all-reduce takes: each host sends, and receives, 2 (n - 1) / n of the bytes; headers come on top."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / bits_per_second


def measure_sum(network: SlowNetwork, nbytes: int, environ: Mapping[str, str], *, launcher: Launcher = "torch") -> list[float]:
    """Seconds of DeepEx's sum of `nbytes` over the hosts, several times; each is the slowest rank's."""
    done = network.run([sys.executable, __file__, "--rank-role", launcher, str(nbytes)], environ, launcher=launcher, timeout=120)
    lines = [line for line in done.output.splitlines() if line.startswith("seconds ")]
    if done.code or not lines:
        raise NetworkError(f"the ranks that measure the link ended with code {done.code}:\n{done.output}")
    return list(json.loads(lines[0].removeprefix("seconds ")))


def rank_role(launcher: str, nbytes: int) -> None:
    """What each rank of `measure_sum` does."""
    from deepex.comm.early import load_mpi

    load_mpi()
    import torch

    from deepex.comm import connect

    torch.set_num_threads(1)
    comm = connect("gloo" if launcher == "torch" else "mpi")
    tensor, seconds = torch.ones(nbytes // 4), []
    for _ in range(7):
        comm.barrier()
        began = perf_counter()
        comm.sum(tensor, 1 / comm.size)
        seconds.append(perf_counter() - began)
    slowest = [max(turn) for turn in zip(*comm.gather(seconds), strict=True)]
    assert comm.place.num_nodes == comm.size, "each host is a node"
    assert torch.equal(tensor, torch.ones_like(tensor)) or comm.size & (comm.size - 1), "the mean of ones"
    if comm.rank == 0:
        print("seconds", json.dumps(slowest[2:]), flush=True)  # the first ones connect, and TCP is still learning the link
    comm.close()


def _path(environ: Mapping[str, str]) -> str:
    """Where programs are: those of root are not on everybody's path."""
    return environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


def cores_of(host: int, hosts: int, cores: Sequence[int]) -> Sequence[int]:
    """A host's share of the cores: as many as each can have, or a place on one of them."""
    own = len(cores) // hosts
    return cores[host * own : (host + 1) * own] if own else [cores[host % len(cores)]]


def free_places(hosts: int, cores: Sequence[int]) -> Sequence[int]:
    """The cores that have a place less taken than the others, where hosts share cores: hosts there would be faster."""
    return cores[hosts % len(cores) :] if hosts > len(cores) and hosts % len(cores) else []


def _enter(process: int) -> list[str]:
    """The words before a command that runs in a host, and that dies with whoever started it."""
    spaces = [f"--{kind}=/proc/{process}/ns/{file}" for kind, file in (("net", "net"), ("uts", "uts"), ("mount", "mnt"))]
    return ["nsenter", *spaces, f"--wdns={Path.cwd()}", *_DIES_WITH_US]


def _start(stack: ExitStack, command: list[str], environ: Mapping[str, str], output: Any) -> subprocess.Popen[bytes]:
    """Start a process that `stack` ends; in a session of its own, so that Ctrl-C comes to us and not to it."""
    process = subprocess.Popen(
        command,
        env={**environ, "PATH": _path(environ)},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
    stack.callback(_end, process)
    return process


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> int:
    """Wait until all have ended well, or one has not."""
    until = perf_counter() + timeout
    while perf_counter() < until:
        codes = [rank.poll() for rank in ranks]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        sleep(0.02)
    return 124


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that may still run; one that holds a host ends when its input closes."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    if process.poll() is None:
        process.kill()
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--bytes", type=int, default=10_000_000)
    parser.add_argument("--launcher", choices=["torch", "mpi"], default="torch")
    parser.add_argument("--rank-role", nargs=2, metavar=("LAUNCHER", "BYTES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_role:
        rank_role(options.rank_role[0], int(options.rank_role[1]))
        return
    try:
        with SlowNetwork(options.hosts, options.rate) as network:
            seconds = statistics.median(measure_sum(network, options.bytes, os.environ, launcher=options.launcher))
    except NetworkError as error:
        sys.exit(str(error))
    ideal = ideal_seconds(options.bytes, options.hosts, parse_rate(options.rate))
    print(
        f"all-reduce of {options.bytes / 1e6:g} MB on {options.hosts} hosts at {options.rate}: {1000 * seconds:.1f} ms, "
        f"ideal {1000 * ideal:.1f} ms, measured/ideal {seconds / ideal:.3f}"
    )


if __name__ == "__main__":
    main()
