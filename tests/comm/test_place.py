"""Rank discovery from the environment of each launcher.

The environments are those of rank 5, the second process of the second node, in a job of 2 nodes with 4 ranks each.
Hydra's was printed by `mpiexec -n 2 env` of MPICH 5.0.2, torchrun's by `torchrun --no-python env` of torch 2.13. Slurm's follow
src/common/env.c and the plugins mpi/pmi2 and mpi/cray_shasta of its source; its interactive step is that of a published job log.
Flux's follow flux-core and the cray-pals plugin of flux-coral2; jsrun's are the JSM variables that MPI test suites read.
"""

import socket
from dataclasses import astuple
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepex.comm.place import LAUNCHERS, Place, find_place
from deepex.errors import CommError
from tests.full import examples

SHELL = {"HOME": "/home/a", "USER": "a", "PATH": "/usr/bin", "HOSTNAME": "n2", "OMP_NUM_THREADS": "8", "LANG": "C.UTF-8"}

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "8",
    "OMPI_APP_CTX_NUM_PROCS": "8",
    "OMPI_FIRST_RANKS": "0",
    "PMIX_RANK": "5",
    "PMIX_NAMESPACE": "prterun-n1-4242@1",
}
HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_FD": "9",
    "PMI_HOSTNAME": "n2",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "HYDI_CONTROL_FD": "7",
}
INTEL_MPI = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_FD": "12",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "I_MPI_MPIRUN": "mpirun",
    "I_MPI_ROOT": "/opt/intel/oneapi/mpi/2021.13",
    "I_MPI_INFO_NUMA_NODE_NUM": "2",
    "HYDRA_BSTRAP_LAUNCHED": "1",
}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "5",
    "MV2_COMM_WORLD_SIZE": "8",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "4",
    "MPISPAWN_ID": "1",
}
SLURM_JOB = {  # what sbatch gives the script, on the first node
    "SLURM_JOB_ID": "4711",
    "SLURM_JOBID": "4711",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "8",
    "SLURM_NPROCS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_TASK_PID": "1234",
    "SLURM_CPUS_ON_NODE": "32",
}
SRUN = SLURM_JOB | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "4,5,6,7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_LAUNCHER_PORT": "40839",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_SRUN_COMM_PORT": "40839",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
SRUN_PMI2 = SRUN | {"SLURM_MPI_TYPE": "pmi2", "PMI_FD": "14", "PMI_JOBID": "4711.0", "PMI_RANK": "5", "PMI_SIZE": "8"}
SRUN_PMIX = SRUN | {"SLURM_MPI_TYPE": "pmix", "PMIX_RANK": "5", "PMIX_NAMESPACE": "slurm.pmix.4711.0"}
# mpiexec starts one helper per node through srun: its ranks inherit a step of 2 tasks, of which theirs is task 1.
HELPER_STEP = SRUN | {
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
CRAY_PALS = {  # HPE's mpiexec under PBS
    "PALS_APID": "a1b2c3",
    "PALS_RANKID": "5",
    "PALS_NODEID": "1",
    "PALS_LOCAL_RANKID": "1",
    "PALS_LOCAL_SIZE": "4",
    "PALS_DEPTH": "16",
    "PALS_SPOOL_DIR": "/var/run/palsd/a1b2c3",
    "PALS_APINFO": "/var/run/palsd/a1b2c3/apinfo",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PMI_UNIVERSE_SIZE": "8",
}
CRAY_SRUN = SRUN | {  # srun --mpi=cray_shasta of a newer Slurm: the same marks, but no PALS_LOCAL_SIZE
    key: value for key, value in CRAY_PALS.items() if key not in ("PALS_LOCAL_SIZE", "PALS_DEPTH")
}
CRAY_SRUN_OLD = SRUN | {  # of an older Slurm: PALS tells rank and node alone, srun the rest
    key: CRAY_PALS[key] for key in ("PALS_APID", "PALS_RANKID", "PALS_NODEID", "PALS_SPOOL_DIR", "PALS_APINFO")
}
PBS = {
    "PBS_JOBID": "99.pbs",
    "PBS_NODEFILE": "/var/spool/pbs/aux/99.pbs",
    "PBS_NODENUM": "0",
    "PBS_TASKNUM": "1",
    "PBS_O_WORKDIR": "/home/a",
    "PBS_ENVIRONMENT": "PBS_BATCH",
    "NCPUS": "32",
}
LSF = {
    "LSB_JOBID": "77",
    "LSB_HOSTS": "batch1 n1 n1 n1 n1 n2 n2 n2 n2",
    "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42",
    "LSB_DJOB_NUMPROC": "85",
    "LSF_ENVDIR": "/opt/lsf/conf",
}
JSRUN = (
    LSF
    | OPEN_MPI
    | {  # Spectrum MPI is an Open MPI: its variables are set too
        "JSM_NAMESPACE_RANK": "5",
        "JSM_NAMESPACE_SIZE": "8",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "4",
        "PMIX_NAMESPACE": "1",
    }
)
FLUX = {
    "FLUX_JOB_ID": "f23PkzMd5",
    "FLUX_JOB_SIZE": "8",
    "FLUX_JOB_NNODES": "2",
    "FLUX_TASK_RANK": "5",
    "FLUX_TASK_LOCAL_ID": "1",
    "FLUX_JOB_TMPDIR": "/tmp/flux-x/jobtmp-1-f23PkzMd5",
    "FLUX_URI": "local:///run/flux/local",
    "PMI_FD": "20",
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
}
FLUX_CRAY = FLUX | {  # pmi=cray-pals,simple
    "PALS_RANKID": "5",
    "PALS_NODEID": "1",
    "PALS_APID": "123456789",
    "PALS_SPOOL_DIR": "/tmp/flux-x/jobtmp-1-f23PkzMd5",
    "PALS_APINFO": "/tmp/flux-x/jobtmp-1-f23PkzMd5/libpals_apinfo",
    "PMI_CONTROL_PORT": "11998,11999",
    "PMI_SHARED_SECRET": "1",
}
FLUX_CRAY_ALONE = {key: value for key, value in FLUX_CRAY.items() if key not in ("PMI_FD", "PMI_RANK", "PMI_SIZE")}  # pmi=cray-pals
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "ROLE_RANK": "5",
    "ROLE_WORLD_SIZE": "8",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "627ac202",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}

FIFTH = (5, 8, 1, 4, 1, 2)  # rank, size, local rank, local size, node, number of nodes

ENVIRONMENTS: dict[str, tuple[dict[str, str], str]] = {
    "Open MPI": (OPEN_MPI, "openmpi"),
    "Open MPI under Slurm": (HELPER_STEP | OPEN_MPI, "openmpi"),
    "Open MPI under PBS": (PBS | OPEN_MPI, "openmpi"),
    "MPICH hydra": (HYDRA, "mpich"),
    "hydra inside a Slurm allocation": (HELPER_STEP | HYDRA, "mpich"),
    "hydra on the batch script's own node": (SLURM_JOB | HYDRA, "mpich"),
    "Intel MPI": (INTEL_MPI, "mpich"),
    "Intel MPI inside a Slurm allocation": (HELPER_STEP | INTEL_MPI, "mpich"),
    "MVAPICH": (MVAPICH, "mpich"),
    "srun": (SRUN, "slurm"),
    "srun --mpi=pmi2": (SRUN_PMI2, "slurm"),
    "srun --mpi=pmix": (SRUN_PMIX, "slurm"),
    "srun on a Cray": (CRAY_SRUN, "slurm"),
    "srun on a Cray with an older Slurm": (CRAY_SRUN_OLD, "slurm"),
    "jsrun": (JSRUN, "jsrun"),
    "PBS with PALS": (PBS | CRAY_PALS, "pals"),
    "PBS with mpiexec of MPICH": (PBS | HYDRA, "mpich"),
    "Flux": (FLUX, "flux"),
    "Flux on a Cray": (FLUX_CRAY, "flux"),
    "Flux on a Cray without simple PMI": (FLUX_CRAY_ALONE, "flux"),
    "torchrun": (TORCHRUN, "torchrun"),
    "torchrun inside srun": (HELPER_STEP | TORCHRUN, "torchrun"),
    "torchrun inside PALS": (PBS | CRAY_PALS | {"PALS_RANKID": "1", "PMI_RANK": "1"} | TORCHRUN, "torchrun"),
}


def numbers(place: Place) -> tuple[int, ...]:
    return astuple(place)[:6]


@pytest.mark.parametrize(("environ", "launcher"), ENVIRONMENTS.values(), ids=ENVIRONMENTS.keys())
def test_each_launcher_tells_the_place(environ: dict[str, str], launcher: str) -> None:
    place = find_place(SHELL | environ)
    assert numbers(place) == FIFTH
    assert place.launcher == launcher
    assert place.host == socket.gethostname()


# What counts as nobody's launch


ALONE = {
    "a shell": {},
    "a Slurm batch script without srun": SLURM_JOB,
    # use_interactive_step: the shell itself runs in the step 0xfffffffa; `--ranks` and mpiexec are meant to be used in it
    "the shell of salloc": SLURM_JOB
    | {
        "SLURM_STEP_ID": "4294967290",
        "SLURM_STEPID": "4294967290",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_SRUN_COMM_PORT": "40839",
        "SLURM_PTY_PORT": "34889",
    },
    "a PBS batch script": PBS,
    "an LSF batch script": LSF,
    "a variable RANK of somebody's own": {"RANK": "5", "LOCAL_RANK": "1"},
}


@pytest.mark.parametrize("environ", ALONE.values(), ids=ALONE.keys())
def test_a_process_that_nobody_launched_is_alone(environ: dict[str, str]) -> None:
    place = find_place(SHELL | environ)
    assert numbers(place) == (0, 1, 0, 1, 0, 1)
    assert place.launcher == "none"


def test_a_step_of_one_task_is_one_rank() -> None:
    one = SRUN | {
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NUM_NODES": "1",
    }
    assert numbers(find_place(one)) == (0, 1, 0, 1, 0, 1)


def test_a_step_smaller_than_its_job_has_the_steps_size() -> None:
    """`srun -n 2 -N 1` in an allocation of 8 tasks on 2 nodes."""
    small = SRUN | {
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
    }
    assert numbers(find_place(small)) == (1, 2, 1, 2, 0, 1)


def test_an_srun_that_tells_its_port_alone_is_recognised() -> None:
    old = {key: value for key, value in SRUN.items() if not key.startswith("SLURM_STEP")}
    assert numbers(find_place(old)) == FIFTH


def test_a_launcher_that_tells_no_more_than_rank_and_size_stands_for_one_node() -> None:
    """PBS with an older mpiexec: plain PMI. The communicator counts hosts itself and knows better once it runs."""
    place = find_place(SHELL | PBS | {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_FD": "6"})
    assert numbers(place) == (5, 8, 5, 8, 0, 1)
    assert place.launcher == "pmi"


@pytest.mark.parametrize(
    ("told", "sizes"),
    [("3,1", [3, 1]), ("2(x2)", [2, 2]), ("1,2,1", [1, 2, 1]), ("4,3", [4, 3]), ("3(x2),1", [3, 3, 1]), ("1(x3),5", [1, 1, 1, 5])],
)
def test_nodes_of_different_sizes_are_counted_as_slurm_lists_them(told: str, sizes: list[int]) -> None:
    ranks = [(node, local) for node, size in enumerate(sizes) for local in range(size)]
    for rank, (node, local) in enumerate(ranks):
        step = {"SLURM_STEP_NUM_TASKS": str(len(ranks)), "SLURM_STEP_NUM_NODES": str(len(sizes)), "SLURM_STEP_TASKS_PER_NODE": told}
        here = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
        assert numbers(find_place(SRUN | step | here)) == (rank, len(ranks), local, sizes[node], node, len(sizes))


@pytest.mark.parametrize("told", ["", "3", "x", "2(x2", "9(x9)", "3,-1"])
def test_a_list_that_does_not_fit_the_job_tells_nothing(told: str) -> None:
    """Then the fuller node's size stands for all."""
    uneven = {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": told}
    assert numbers(find_place(SRUN | uneven)) == (6, 7, 2, 4, 1, 2)


def test_rank_and_world_size_alone_are_a_launch_too() -> None:
    """As schedulers set them for PyTorch; any launcher's own variables count more."""
    told = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "n1"}
    place = find_place(SHELL | told)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.launcher) == (5, 8, 1, 4, "environment")
    assert find_place(told | HYDRA | {"PMI_RANK": "2"}).rank == 2


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
def test_each_launchers_whole_job_is_a_permutation_of_ranks(launcher: Any) -> None:
    """Every rank of 2 × 4, from the variables in the table alone: each pair of node and local rank comes once."""
    places = []
    for rank in range(8):
        values = dict.fromkeys(launcher.requires, "8")
        for names, value in (
            (launcher.rank, rank),
            (launcher.size, 8),
            (launcher.local_rank, rank % 4),
            (launcher.local_size, 4),
            (launcher.node, rank // 4),
            (launcher.num_nodes, 2),
        ):
            if names:
                values[names[0]] = str(value)
        places.append(find_place(values))
    assert [place.launcher for place in places] == [launcher.name] * 8
    assert [place.rank for place in places] == list(range(8))
    assert len({(place.node, place.local_rank) for place in places}) == 8


# Nonsense


BARE = {
    "torchrun": TORCHRUN,
    "jsrun": {key: value for key, value in JSRUN.items() if key.startswith("JSM")},
    "openmpi": OPEN_MPI,
    "pals": {key: value for key, value in CRAY_PALS.items() if key.startswith("PALS")} | {"PMI_SIZE": "8"},
    "flux": {key: value for key, value in FLUX.items() if key.startswith("FLUX")},
    "mpich": HYDRA,
    "slurm": SRUN,
    "pmi": {"PMI_RANK": "5", "PMI_SIZE": "8"},
    "environment": {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
}

VARIABLES = [
    (launcher.name, name)
    for launcher in LAUNCHERS
    for group in (launcher.rank, launcher.size, launcher.local_rank, launcher.local_size, launcher.node, launcher.num_nodes)
    for name in [next((name for name in group if name in BARE[launcher.name]), None)]
    if name is not None
]


@pytest.mark.parametrize(("launcher", "name"), VARIABLES)
@pytest.mark.parametrize("value", ["", "five", "1.5", "0x5", "4(x2)"])
def test_a_value_that_is_no_number_names_its_variable(launcher: str, name: str, value: str) -> None:
    with pytest.raises(CommError) as caught:
        find_place(BARE[launcher] | {name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)
    assert launcher in str(caught.value)


@pytest.mark.parametrize(
    "launcher", [launcher for launcher in LAUNCHERS if launcher.requires != launcher.size], ids=lambda launcher: launcher.name
)
def test_a_missing_size_names_what_was_looked_for(launcher: Any) -> None:
    environ = {key: value for key, value in BARE[launcher.name].items() if key not in launcher.size}
    with pytest.raises(CommError) as caught:
        find_place(environ)
    assert all(name in str(caught.value) for name in launcher.size)
    assert launcher.rank[0] in str(caught.value)


def test_a_missing_size_names_the_rank_that_was_found() -> None:
    with pytest.raises(CommError, match="MV2_COMM_WORLD_RANK is set"):
        find_place({"MV2_COMM_WORLD_RANK": "5", "MV2_COMM_WORLD_LOCAL_RANK": "1"})


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
@pytest.mark.parametrize("rank", ["8", "9", "-1"])
def test_a_rank_outside_the_size_is_stale(launcher: Any, rank: str) -> None:
    with pytest.raises(CommError) as caught:
        find_place(BARE[launcher.name] | {launcher.rank[0]: rank})
    assert f"{launcher.name!r} gave rank {rank} of 8" in str(caught.value)
    assert "stale" in str(caught.value)


SIZES = [(la.name, next(name for name in la.size if name in BARE[la.name])) for la in LAUNCHERS]


@pytest.mark.parametrize(("launcher", "name"), SIZES)
@pytest.mark.parametrize("size", ["0", "-8"])
def test_a_size_below_one_is_refused(launcher: str, name: str, size: str) -> None:
    with pytest.raises(CommError):
        find_place(BARE[launcher] | {name: size})


ZEROS = [(launcher.name, names[0]) for launcher in LAUNCHERS for names in (launcher.local_size, launcher.num_nodes) if names]


@pytest.mark.parametrize(("launcher", "name"), ZEROS)
@pytest.mark.parametrize("value", ["0", "-1"])
def test_a_count_below_one_is_refused(launcher: str, name: str, value: str) -> None:
    with pytest.raises(CommError):
        find_place(BARE[launcher] | {name: value})


CONTRADICTIONS = [
    ("openmpi", {"OMPI_COMM_WORLD_LOCAL_RANK": "4"}),  # of a local size of 4
    ("mpich", {"MPI_LOCALRANKID": "7"}),
    ("mpich", {"MPI_LOCALNRANKS": "9"}),  # more on the node than in the job
    ("torchrun", {"GROUP_RANK": "2"}),  # of 2 nodes
    ("slurm", {"SLURM_NODEID": "2"}),
    ("jsrun", {"JSM_NAMESPACE_LOCAL_RANK": "-1"}),
]


@pytest.mark.parametrize(
    ("launcher", "changes"), CONTRADICTIONS, ids=[f"{name} {'='.join(*c.items())}" for name, c in CONTRADICTIONS]
)
def test_variables_that_contradict_each_other_are_refused(launcher: str, changes: dict[str, str]) -> None:
    with pytest.raises(CommError, match="stale"):
        find_place(BARE[launcher] | changes)


@st.composite
def any_environments(draw: st.DrawFn) -> dict[str, str]:
    """The variables of one launcher, of which some are missing and some are nonsense."""
    environ = dict(BARE[draw(st.sampled_from(sorted(BARE)))])
    for name in draw(st.lists(st.sampled_from(sorted(environ)), max_size=4)):
        environ[name] = draw(st.sampled_from(["-1", "0", "1", "4", "5", "8", "x", ""]))
    for name in draw(st.lists(st.sampled_from(sorted(environ)), max_size=2)):
        environ.pop(name, None)
    return environ


@settings(max_examples=examples(50, 200))
@given(any_environments())
def test_any_environment_gives_a_place_or_an_error_of_ours(environ: dict[str, str]) -> None:
    try:
        place = find_place(environ)
    except CommError:
        return
    assert 0 <= place.rank < place.size
    assert 0 <= place.local_rank < place.local_size <= place.size
    assert 0 <= place.node < place.num_nodes


# A place on its own


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 1},
        {"rank": -1},
        {"size": 0},
        {"local_rank": 1},
        {"local_rank": -1},
        {"local_size": 2},
        {"node": 1},
        {"node": -1},
        {"num_nodes": 0},
    ],
    ids=str,
)
def test_a_place_checks_itself(wrong: dict[str, int]) -> None:
    with pytest.raises(CommError, match="ranks count from 0 below the size"):
        Place(**wrong)
