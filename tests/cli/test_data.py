"""`deepex data` as a process: its exit codes, and what it says when it is interrupted."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deepex.data.pack import pack
from tests.mpi import HANGS

DEEPEX = [sys.executable, "-m", "deepex"]


def run(*words: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*DEEPEX, *map(str, words)], capture_output=True, text=True, timeout=HANGS, check=False)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    np.savez(tmp_path / "i.npz", images=np.arange(1600).reshape(100, 4, 4) % 251, labels=np.arange(100) % 3)
    pack(tmp_path / "i.npz", tmp_path / "packed")
    return tmp_path / "packed"


def test_verify_ends_with_2_if_a_file_is_damaged(packed: Path) -> None:
    assert run("data", "verify", packed).returncode == 0
    labels = packed / "train-00000-labels.npy"
    labels.write_bytes(labels.read_bytes()[:-1])
    done = run("data", "verify", packed)
    assert done.returncode == 2
    assert "train-00000-labels.npy" in done.stdout


@pytest.mark.slow
def test_an_interrupted_packing_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "in" / "0.png")
    for number in range(1, 160):
        os.link(tmp_path / "in" / "0.png", tmp_path / "in" / f"{number}.png")
    words = ["data", "pack", str(tmp_path / "in"), str(tmp_path / "out"), "--file-mib", "1", "--validation", "0", "--workers", "1"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's job in the background is deaf to it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*DEEPEX, *words], **pipes, preexec_fn=heard) as packing:  # noqa: PLW1509 - nothing else runs here
        while not (tmp_path / "out" / ".packing" / "train-00000.json").exists():
            assert packing.poll() is None, packing.stderr
            time.sleep(0.01)
        packing.send_signal(signal.SIGINT)
        _, said = packing.communicate(timeout=HANGS)
    assert packing.returncode == 130
    assert "the same command goes on from there" in said
    assert said.splitlines()[-1] == "deepex: interrupted"
    assert "Traceback" not in said
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert run(*words).returncode == 0


def test_mistakes_of_the_command_line_have_a_remedy(packed: Path, tmp_path: Path) -> None:
    done = run("data", "pack", tmp_path / "i.npz", tmp_path / "out", "--validation", "")
    assert (done.returncode, "give a share such as 0.1" in done.stderr) == (2, True)
    done = run("data", "info", packed / "train-00000.npy")
    assert (done.returncode, "is a file, and a packed dataset is a directory" in done.stderr) == (2, True)
    assert "pip install 'deepex[science]'" in run("data", "make", "--help").stdout
