"""A Slurm of our own over hosts: munged and slurmctld on the login host, a slurmd on each of the others.

    with Hosts(folder, ("n1", "n2")) as hosts, Slurm(hosts, cores=8) as slurm:
        hosts.login.run(["srun", "-N", "2", "hostname"], seconds=20, environ=os.environ | slurm.environ)

Nodes claim more cores than the machine has, so that a few of them give the placements of a real cluster.
"""

import os
from typing import Final, Self

from tests.cluster.hosts import ClusterError, Hosts, absolute, need

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue", "sinfo")

_CONFIG: Final = """
ClusterName=test
SlurmctldHost=login({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
KillWait=2
MinJobAge=300
SlurmdTimeout=30
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
TmpFS={folder}/tmp-%n
"""
_MUNGE_FILES: Final = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
_NODE: Final = "NodeName={name} NodeAddr={address} CPUs={cores} RealMemory=1000 State=UNKNOWN\n"
_PARTITION: Final = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"


class Slurm:
    """Slurm over all hosts but the login host, which has the controller. `environ` is what its commands want to know."""

    def __init__(self, hosts: Hosts, *, cores: int) -> None:
        need(PROGRAMS)
        self._hosts, self._folder, self._cores = hosts, hosts.folder, cores
        self.environ = {"SLURM_CONF": str(self._folder / "slurm.conf")}

    def __enter__(self) -> Self:
        self._write_files()
        self._munge()
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for host in self._hosts.compute:
            command = [absolute("slurmd"), "-D", "-N", host.name]
            host.start(command, self._folder / f"slurmd-{host.name}.out", os.environ | self.environ)
        self._wait_for_nodes()
        self._hosts.settle()
        return self

    def __exit__(self, *error: object) -> None:
        """The daemons end with their hosts."""

    def cancel(self) -> None:
        """End every job."""
        self._hosts.login.run(["scancel", "--signal=KILL", "--user=root"], seconds=20, environ=os.environ | self.environ)

    def _write_files(self) -> None:
        nodes = [_NODE.format(name=host.name, address=host.address, cores=self._cores) for host in self._hosts.compute]
        text = _CONFIG.format(folder=self._folder, address=self._hosts.login.address)
        (self._folder / "slurm.conf").write_text("".join([text, *nodes, _PARTITION]))
        for name in ("state", *(f"{kind}-{host.name}" for host in self._hosts.compute for kind in ("spool", "tmp"))):
            (self._folder / name).mkdir()

    def _munge(self) -> None:
        """One munged serves all hosts, since they share its socket's file system."""
        folder = self._folder
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        paths = [f"--{what}={folder}/munge.{end}" for what, end in _MUNGE_FILES.items()]
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=4", *paths)
        ended = self._hosts.wait_for(["munge", "--no-input", f"--socket={folder}/munge.socket"])
        if ended.code:
            raise ClusterError(f"munged did not start: {ended}\n{(folder / 'munged.out').read_text()}")

    def _start(self, name: str, program: str, *arguments: str) -> None:
        self._hosts.login.start([absolute(program), *arguments], self._folder / f"{name}.out", os.environ | self.environ)

    def _wait_for_nodes(self) -> None:
        count = len(self._hosts.compute)
        command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        ended = self._hosts.wait_for(command, os.environ | self.environ, expected=f"{count}\n")
        if ended.stdout != f"{count}\n":
            logs = "\n".join(path.read_text() for path in sorted(self._folder.glob("slurm*.[lo]*")))
            raise ClusterError(f"Slurm did not get its {count} nodes: {ended}\n{logs}")
