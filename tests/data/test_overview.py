"""What is in a dataset, to look at."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from deepex.cli.data import app
from deepex.data.dataset import PackedDataset
from deepex.data.overview import contact_sheet, look
from deepex.data.pack import pack
from deepex.errors import DataError


def packed(folder: Path, *, channels: int = 1, labelled: bool = True) -> PackedDataset:
    """Images of class k are 40 · k, in three classes of 50, 30 and 20."""
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    images = np.broadcast_to((labels * 40).astype(np.uint8)[:, None, None, None], (100, 9, 7, channels))
    names = {"labels": labels} if labelled else {}
    np.savez(folder / "a.npz", images=images, **names)
    pack(folder / "a.npz", folder / "out", validation=0.2, layout="NHWC")
    return PackedDataset.open(folder / "out")


def test_counts_and_histogram(tmp_path: Path) -> None:
    overview = look(packed(tmp_path))
    both = [sum(overview.counts[part][name] for part in ("train", "validation")) for name in "012"]
    assert both == [50, 30, 20]
    shares = overview.histogram["shares"]
    assert sum(shares) == pytest.approx(1, abs=1e-4)
    train = overview.counts["train"]
    expected = {int(40 * k / 255 * len(shares)): train[str(k)] / sum(train.values()) for k in range(3)}
    assert {place: share for place, share in enumerate(shares) if share} == pytest.approx(expected, abs=1e-5)


def test_a_histogram_of_all_that_float32_can_hold(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.tile(np.array([-3.4e38, 0, 3.4e38, 3.4e38], np.float32), (8, 4, 1)))
    pack(tmp_path / "i.npy", tmp_path / "out", validation=0, layout="NHW")
    shares = look(PackedDataset.open(tmp_path / "out")).histogram["shares"]
    assert [share for share in shares if share] == [0.25, 0.25, 0.5]


@pytest.mark.parametrize(("channels", "labelled"), [(1, True), (3, True), (1, False)])
def test_a_contact_sheet_has_a_row_for_each_class(tmp_path: Path, channels: int, labelled: bool) -> None:
    rows, columns = contact_sheet(packed(tmp_path, channels=channels, labelled=labelled), tmp_path / "sheet.png")
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    assert sheet.shape == (rows * 11 - 2, columns * 9 - 2, 3)
    if labelled:
        assert rows == 3
        for row in range(3):
            assert (sheet[row * 11 : row * 11 + 9, :7] == 40 * row).all()


def test_the_command_shows_and_draws(tmp_path: Path) -> None:
    packed(tmp_path)
    done = CliRunner().invoke(app, ["info", str(tmp_path / "out"), "--sheet", str(tmp_path / "s.png")], catch_exceptions=False)
    assert "per class, train" in done.output
    assert "histogram" in done.output
    assert (tmp_path / "s.png").stat().st_size > 100
    told = CliRunner().invoke(app, ["info", str(tmp_path / "out"), "--json"], catch_exceptions=False)
    assert sum(json.loads(told.stdout)["counts"]["train"].values()) == 80


def test_images_that_no_sheet_can_show_are_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="of 4 channels"):
        contact_sheet(packed(tmp_path, channels=4), tmp_path / "sheet.png")
