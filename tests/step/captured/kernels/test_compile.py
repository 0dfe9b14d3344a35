"""Every kernel compiles for a GPU, here where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled and run by the other tests here")
def test_every_kernel_compiles_for_a_gpu(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """What was compiled is kept until a kernel or Triton changes, which its name there tells."""
    kept = getattr(request.config, "cache", None)
    folder = kept.mkdir("triton") if kept is not None else tmp_path / "cache"
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = [sys.executable, "-W", "ignore", "-m", "tests.step.captured.kernels.compiling", str(tmp_path / "found.json")]
    subprocess.run(program, env=environ | {"TRITON_CACHE_DIR": str(folder)}, check=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed"] == {}
    assert found["compiled"] == found["known"]
