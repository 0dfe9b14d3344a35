"""Benchmarks of a GPU, where there is none."""

from types import ModuleType

import pytest
import torch

import gpu
import gpu_kernels
import gpu_replicas


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one: it would be measured")
@pytest.mark.parametrize("program", [gpu, gpu_kernels, gpu_replicas], ids=lambda module: module.__name__)
def test_it_says_so_at_once(program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [program.__name__])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("there is no GPU here: `deepex doctor`")
