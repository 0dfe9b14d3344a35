"""Hosts on this machine: namespaces of the kernel, joined by a bridge, with an sshd in each.

    with Hosts(folder, ("n1", "n2")) as hosts:
        hosts.login.run(["ssh", "-F", str(hosts.ssh_config), "n2", "hostname"], seconds=10).stdout     # "n2\n"

A host has a network, a name, processes, a /dev/shm and a /run of its own; the file system is shared, as on a cluster. The login
host holds the bridge. Each host lives as long as its first process, which ends when our end of its standard input is closed. The
kernel then ends what runs there and takes down mounts and links, also when the tests are killed.
"""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Final, Self

PROGRAMS: Final = ("unshare", "nsenter", "mount", "hostname", "ip", "ssh", "ssh-keygen", "sshd")
_NAMESPACES: Final = ("--net", "--uts", "--ipc", "--mount", "--pid")
_STARTS: Final = 30.0  # seconds in which a daemon must answer

# What the first process of a host does. It ignores the ends of children, so that orphans which it inherits leave no zombies.
_FIRST: Final = """
hostname "$1"
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind "$2" /etc/hosts
ip link set lo up
trap '' CHLD
echo ready
exec cat
"""

_SSHD: Final = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""

_SSH: Final = """
Host *
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 10
"""


class ClusterError(Exception):
    """The hosts cannot be had here; the message says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ended, or was ended after its time: then `code` is None."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        how = "had to be ended" if self.code is None else f"ended with {self.code}"
        return f"{how} after {self.seconds:.1f} s\n{self.stdout}\n{self.stderr}"


def need(programs: Sequence[str]) -> None:
    """Refuse to go on where something is missing that hosts are made of."""
    missing = [program for program in programs if shutil.which(program, path=_path()) is None]
    if missing:
        raise ClusterError(f"{', '.join(missing)} not found: run `make test-cluster` as root on Debian, which installs them")
    if os.geteuid() != 0:
        raise ClusterError(f"the user id is {os.geteuid()}; only root may make hosts: run `make test-cluster` as root")
    tried = subprocess.run(["unshare", *_NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise ClusterError(f"{tried.stderr.strip()}: hosts are namespaces: give the container CAP_SYS_ADMIN and CAP_NET_ADMIN")


class Host:
    """One host. `run` waits for a command, `start` leaves a daemon running."""

    def __init__(self, name: str, address: str, names: Path) -> None:
        self.name, self.address = name, address
        command = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-ec", _FIRST, "sh", name, str(names)]
        # A session of its own: Ctrl-C is for the tests, which then close the host.
        self._first = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=os.environ | {"PATH": _path()}
        )
        assert self._first.stdout is not None
        if self._first.stdout.readline() != b"ready\n":
            raise ClusterError(f"host {name} could not be made: see the message above; the container may lack CAP_SYS_ADMIN")
        self.pid = self._first.pid
        self._space = os.readlink(f"/proc/{self.pid}/ns/pid_for_children")
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._own: set[int] = set()

    def entered(self, command: Sequence[str]) -> list[str]:
        """`command` as this host runs it."""
        processes = f"--pid=/proc/{self.pid}/ns/pid_for_children"
        return ["nsenter", f"--target={self.pid}", *_NAMESPACES[:-1], processes, "env", f"--chdir={Path.cwd()}", *command]

    def run(self, command: Sequence[str], *, seconds: float, environ: Mapping[str, str] | None = None) -> Ended:
        """Run `command` for so long at most. Output goes through files: a process left behind would hold a pipe open."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            begun = monotonic()
            process = subprocess.Popen(
                self.entered(command), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environ, start_new_session=True
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            return Ended(code=code, stdout=_text(out), stderr=_text(err), seconds=monotonic() - begun)

    def start(self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a daemon; what it prints goes into `log`."""
        with log.open("ab") as file:
            daemon = subprocess.Popen(
                self.entered(command), stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, start_new_session=True
            )
        self._daemons.append(daemon)
        return daemon

    def processes(self) -> set[int]:
        """What runs on this host now."""
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it may have ended meanwhile
                if os.readlink(folder / "ns/pid") == self._space and (folder / "cmdline").read_bytes():
                    found.add(int(folder.name))
        return found

    def settle(self) -> None:
        """From here on, what runs now belongs to the host."""
        self._own = self.processes()

    def left(self) -> dict[int, str]:
        """What runs besides: of jobs, as a line for each process."""
        lines = {}
        for pid in self.processes() - self._own:
            with suppress(OSError):
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return lines

    def sweep(self) -> None:
        """End what jobs have left."""
        for pid in self.left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """End the host and everything on it."""
        assert self._first.stdin is not None
        assert self._first.stdout is not None
        self._first.stdin.close()
        self._first.stdout.close()
        self._first.wait()
        for daemon in self._daemons:
            daemon.wait()


class Hosts:
    """A login host and `names`, joined by a bridge. `ssh` is a program that a launcher can use as its ssh."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        need(PROGRAMS)
        self.folder, self.ssh_config, self.ssh = folder, folder / "ssh_config", folder / "ssh"
        self._names = names
        self._stack = ExitStack()
        self._write_files()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.login = self._make(stack, "login", 1)
            self._login_net(["ip", "link", "add", "bridge", "type", "bridge"])
            self._login_net(["ip", "addr", "add", f"{self.login.address}/24", "dev", "bridge"])
            self._login_net(["ip", "link", "set", "bridge", "up"])
            self.compute = tuple(self._make(stack, name, number) for number, name in enumerate(self._names, 2))
            sshd = [absolute("sshd"), "-D", "-e", "-f", str(self.folder / "sshd_config")]
            for host in self.compute:
                self._join(host)
                host.start(sshd, self.folder / f"sshd-{host.name}.log")
            for host in self.compute:
                self._wait_for_ssh(host)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def all(self) -> tuple[Host, ...]:
        """The login host and the others."""
        return (self.login, *self.compute)

    def settle(self) -> None:
        """Take what runs now for the hosts' own."""
        for host in self.all:
            host.settle()

    def left(self) -> dict[str, list[str]]:
        """What jobs have left on each host."""
        return {host.name: list(lines.values()) for host in self.all if (lines := host.left())}

    def sweep(self) -> None:
        """End what jobs have left on any host."""
        for host in self.all:
            host.sweep()

    def _make(self, stack: ExitStack, name: str, number: int) -> Host:
        host = Host(name, f"10.77.0.{number}", self.folder / "hosts")
        stack.callback(host.close)
        return host

    def _write_files(self) -> None:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key")], check=True)
        numbered = enumerate(("login", *self._names), 1)
        lines = ["127.0.0.1 localhost", *(f"10.77.0.{number} {name}" for number, name in numbered)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        (self.folder / "sshd_config").write_text(_SSHD.format(folder=self.folder))
        self.ssh_config.write_text(_SSH.format(folder=self.folder))
        self.ssh.write_text(f'#!/bin/sh\nexec ssh -F {self.ssh_config} "$@"\n')
        self.ssh.chmod(0o755)

    def _login_net(self, command: Sequence[str]) -> None:
        """Run a command in the network of the login host, but with the process ids of ours: `ip` takes one to name a host."""
        entered = ["nsenter", f"--target={self.login.pid}", "--net", *command]
        done = subprocess.run(entered, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} said {done.stderr.strip()!r}: the container may lack CAP_NET_ADMIN")

    def _join(self, host: Host) -> None:
        self._login_net(["ip", "link", "add", host.name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)])
        self._login_net(["ip", "link", "set", host.name, "master", "bridge", "up"])
        host.run(["ip", "addr", "add", f"{host.address}/24", "dev", "eth0"], seconds=_STARTS)
        host.run(["ip", "link", "set", "eth0", "up"], seconds=_STARTS)

    def _wait_for_ssh(self, host: Host) -> None:
        ended = self.wait_for([str(self.ssh), host.name, "true"])
        if ended.code:
            log = (self.folder / f"sshd-{host.name}.log").read_text()
            raise ClusterError(f"no ssh to {host.name}: {ended}\n{log}")

    def wait_for(self, command: Sequence[str], environ: Mapping[str, str] | None = None, expected: str = "") -> Ended:
        """Repeat `command` on the login host until it succeeds and says what is expected; gives its last end."""
        deadline = monotonic() + _STARTS
        while True:
            ended = self.login.run(command, seconds=_STARTS, environ=environ)
            if (ended.code == 0 and expected in ended.stdout) or monotonic() > deadline:
                return ended
            sleep(0.1)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _path() -> str:
    """Where programs are looked for: daemons are where a user need not look."""
    return f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin"


def absolute(program: str) -> str:
    """The full path of a daemon; sshd starts itself again and insists on it."""
    return shutil.which(program, path=_path()) or program
