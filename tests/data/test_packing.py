"""How a dataset is packed: read in order and shuffled, by workers and ranks, interrupted, with bad samples, on a full disk."""

import copy
import errno
import hashlib
import os
import resource
import shutil
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from deepex.comm import as_communicator
from deepex.data.dataset import PackedDataset
from deepex.data.manifest import load
from deepex.data.pack import pack, pack_source
from deepex.data.packing import plan
from deepex.data.packing.config import PackConfig
from deepex.data.packing.fingerprint import feed, stamps
from deepex.data.packing.moments import Moments
from deepex.data.packing.site import Site
from deepex.data.source.base import Bad, Images, Source
from deepex.errors import DataError, StorageError
from tests.full import examples
from tests.mpi import HANGS, rank_environ, run_ranks
from tests.pool import RankPool


@final
class Numbered(Images):
    """Sample n is `first` + n everywhere; a log has a line for every block that was read."""

    busy = True

    def __init__(
        self, count: int, *, block: int, bad: frozenset[int] = frozenset(), log: Path | None = None, first: int = 0
    ) -> None:
        self.count, self.block, self.shape, self.dtype = count, block, (2, 3, 1), np.dtype(np.int32)
        self.labels = np.arange(count) % 5
        self.description = {"made": "for a test"}
        self._bad, self._log, self._first = bad, log, first
        self.pause = 0.0  # seconds, before each reading

    def read(self, numbers: NDArray[np.int64], out: NDArray[Any]) -> list[Bad]:
        assert (np.diff(numbers) > 0).all()
        time.sleep(self.pause)
        if self._log is not None:
            with self._log.open("a") as file:
                file.writelines(f"{block}\n" for block in sorted({int(n) // self.block for n in numbers}))
        out[:] = self._first + numbers[:, None, None, None]
        return [Bad(place, self.name(int(n)), "is broken") for place, n in enumerate(numbers) if int(n) in self._bad]

    def name(self, number: int) -> str:
        return f"number {number}"


def put(images: Images, out: Path, *, workers: int = 1, progress: Any = None, **options: Any) -> None:
    config = PackConfig(**{"dtype": "float32", **options})
    site = Site(out)
    with site.at_work():
        pack_source(Source(train=images), site, config, command="", workers=workers, progress=progress)


def interrupted_after(samples: int) -> Any:
    """What tells of progress until so many are done."""

    def tell(_: str, done: int, __: int) -> None:
        if done > samples:
            raise KeyboardInterrupt

    return tell


def contents(out: Path) -> dict[str, list[tuple[int, int]]]:
    """Value and label of each sample of each part."""
    dataset = PackedDataset.open(out)
    found = {}
    for name in dataset.manifest.parts:
        images, labels = dataset.part(name).read(0, dataset.part(name).count)
        assert (images == images[:, :1, :1, :1]).all()
        found[name] = [(int(image[0, 0, 0]), int(label)) for image, label in zip(images, labels, strict=True)]
    return found


def digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


@settings(deadline=None, max_examples=examples(8, 20))
@given(st.data())
def test_a_source_in_blocks_is_read_once_and_shuffled(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("blocks")
    count, block = data.draw(st.integers(2, 60)), data.draw(st.integers(1, 25))
    bad = data.draw(st.frozensets(st.integers(0, count - 1), max_size=count // 4))
    share = data.draw(st.sampled_from([0.0, 0.3]))
    log = folder / "log"
    images = Numbered(count, block=block, bad=bad, log=log)
    patch = pytest.MonkeyPatch()
    patch.setattr(plan, "_UNPACKED_BYTES", data.draw(st.sampled_from([200, 4 << 20])))
    try:
        put(images, folder / "out", skip_bad=True, validation=share, file_bytes=data.draw(st.integers(24, 400)))
    except DataError as error:
        assert "no sample of the part" in str(error)  # noqa: PT017 - a part may have drawn nothing but bad ones
        return
    finally:
        patch.undo()
    found = contents(folder / "out")
    both = sorted(value for part in found.values() for value, _ in part)
    assert both == sorted(set(range(count)) - bad)
    assert all(label == value % 5 for part in found.values() for value, label in part)
    source = load(folder / "out").source
    assert source.get("skipped", {"count": 0})["count"] == len(bad)
    if bad:
        lines = (folder / "out" / "skipped.txt").read_text().splitlines()
        assert sorted(lines) == sorted(f"number {n}: is broken" for n in bad)
    if block > 1:
        assert max(Counter(log.read_text().split()).values()) == 1
    assert not (folder / "out" / ".packing").exists()


def test_without_skip_bad_the_first_bad_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"number 7: is broken; .*--skip-bad"):
        put(Numbered(20, block=4, bad=frozenset({7})), tmp_path / "out")
    with pytest.raises(DataError, match="did not finish"):
        load(tmp_path / "out")


def pack_on_ranks(comm: Any, out: str, block: int) -> None:
    ours = as_communicator(comm)
    site = Site(Path(out), ours)
    with site.at_work():
        source = site.find(lambda: Source(train=Numbered(100, block=block)))
        pack_source(source, site, PackConfig(dtype="float32", file_bytes=200), command="")
    ours.close()


@pytest.mark.slow
@pytest.mark.parametrize("block", [1, 6])
def test_workers_and_ranks_write_the_same_bytes_as_one_process(block: int, ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(pack_on_ranks, tmp_path / "ranks", block, size=3)
    put(Numbered(100, block=block), tmp_path / "one", file_bytes=200)
    put(Numbered(100, block=block), tmp_path / "two", file_bytes=200, workers=2)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert digests(tmp_path / "one") == digests(tmp_path / "ranks")


@pytest.mark.ranks
@pytest.mark.slow
def test_a_rank_that_finds_a_bad_sample_stops_all_with_one_message(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.where(np.arange(40)[:, None, None] == 33, np.nan, 1.0) * np.ones((40, 2, 2)))
    done = run_ranks(examples(2, 3), "-m", "deepex", "data", "pack", str(tmp_path / "i.npy"), str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.count("sample 33: has the value nan") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("block", [1, 10])
def test_an_interrupted_packing_goes_on_where_it_stopped(tmp_path: Path, block: int) -> None:
    put(Numbered(200, block=block), tmp_path / "whole", file_bytes=240)
    log, out = tmp_path / "log", tmp_path / "out"
    images = Numbered(200, block=block, log=log)

    def interrupt(what: str, done: int, _: int) -> None:
        if what == "packing" and done > 120:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        put(images, out, file_bytes=240, progress=interrupt)
    with pytest.raises(DataError, match="did not finish"):
        load(out)
    before, told = log.read_text(), []
    put(images, out, file_bytes=240, progress=lambda *values: told.append(values))
    assert told[0][1] >= 110
    again = log.read_text().removeprefix(before).split()
    assert len(again) == (0 if block > 1 else 80)  # what was finished was not read again
    assert digests(out) == digests(tmp_path / "whole")


def test_a_finished_file_that_was_broken_meanwhile_is_written_again(tmp_path: Path) -> None:
    """As a loss of power may leave it: there, of the right size, and wrong."""
    put(Numbered(100, block=1), tmp_path / "whole", file_bytes=240)

    with pytest.raises(KeyboardInterrupt):
        put(Numbered(100, block=1), tmp_path / "out", file_bytes=240, progress=interrupted_after(50))
    broken = tmp_path / "out" / "train-00001.npy"
    broken.write_bytes(bytes(broken.stat().st_size))
    put(Numbered(100, block=1), tmp_path / "out", file_bytes=240)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_finished_labels_that_were_broken_meanwhile_are_written_again(tmp_path: Path) -> None:
    put(Numbered(100, block=1), tmp_path / "whole", file_bytes=240)
    with pytest.raises(KeyboardInterrupt):
        put(Numbered(100, block=1), tmp_path / "out", file_bytes=240, progress=interrupted_after(50))
    broken = tmp_path / "out" / "train-00001-labels.npy"
    broken.write_bytes(broken.read_bytes()[:-9])
    put(Numbered(100, block=1), tmp_path / "out", file_bytes=240)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize("change", ["content", "place"])
def test_a_source_that_changed_meanwhile_is_packed_from_the_start(tmp_path: Path, change: str) -> None:
    first, second = (np.full((200, 4, 4), value, np.uint8) for value in (1, 2))
    for name, array in (("a", first), ("b", second)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", array)
    options: dict[str, Any] = {"file_bytes": 160, "validation": 0.0}
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path / "a" / "x.npy", tmp_path / "out", progress=interrupted_after(50), **options)
    if change == "content":
        np.save(tmp_path / "a" / "x.npy", second)
    pack(tmp_path / ("a" if change == "content" else "b") / "x.npy", tmp_path / "out", **options)
    assert (PackedDataset.open(tmp_path / "out").part("train").read(0, 200)[0] == 2).all()


def listed_in(folder: Path) -> Path:
    (folder / "list.txt").write_text("".join(f"a/{number}.png 0\n" for number in range(60)))
    return folder / "list.txt"


def linked_list(folder: Path) -> Path:
    """Its names are relative to where the link is."""
    (folder / "in").mkdir()
    (folder / "in" / "a").symlink_to(folder / "a")
    (folder / "in" / "list.txt").symlink_to(listed_in(folder))
    return folder / "in" / "list.txt"


def linked_class(folder: Path) -> Path:
    (folder / "in").mkdir()
    (folder / "in" / "a").symlink_to(folder / "a")
    return folder / "in"


def linked_files(folder: Path) -> Path:
    (folder / "in").mkdir()
    for number in range(60):
        (folder / "in" / f"{number}.png").symlink_to(folder / "a" / f"{number}.png")
    return folder / "in"


@pytest.mark.parametrize("source", [lambda folder: folder / "a", listed_in, linked_list, linked_class, linked_files])
def test_files_that_were_rewritten_meanwhile_are_read_again(tmp_path: Path, source: Callable[[Path], Path]) -> None:
    (tmp_path / "a").mkdir()
    path = source(tmp_path)
    for value in (1, 2):
        for number in range(60):
            Image.fromarray(np.full((8, 8), value, np.uint8)).save(tmp_path / "a" / f"{number}.png")
        if value == 1:
            with pytest.raises(KeyboardInterrupt):
                pack(path, tmp_path / "out", progress=interrupted_after(20), file_bytes=300, validation=0.0)
    pack(path, tmp_path / "out", file_bytes=300, validation=0.0)
    assert (PackedDataset.open(tmp_path / "out").part("train").read(0, 60)[0] == 2).all()


def test_stamps_end_where_links_lead_back_or_nowhere(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "list.txt").write_text("a/gone.png 0\n")
    for path in (tmp_path, tmp_path / "list.txt"):
        names = [Path(os.fsdecode(bytes.fromhex(name))).name for name, _, _ in stamps([path])]
        assert names == ["list.txt", "gone.png"]


def test_bad_samples_may_be_skipped_after_all_without_beginning_anew(tmp_path: Path) -> None:
    """And the other way round: what was skipped is an error again."""
    log = tmp_path / "log"
    log.touch()
    images = Numbered(100, block=1, log=log, bad=frozenset({61}))
    options: dict[str, Any] = {"file_bytes": 240, "given_order": True, "validation": 0.0}
    with pytest.raises(DataError, match="--skip-bad"):
        put(images, tmp_path / "out", **options)
    before = log.read_text()
    put(images, tmp_path / "out", **options, skip_bad=True)
    again = log.read_text().removeprefix(before).split()
    assert min(map(int, again)) == 60
    assert len(contents(tmp_path / "out")["train"]) == 99
    with pytest.raises(KeyboardInterrupt):
        put(
            images,
            tmp_path / "two",
            file_bytes=240,
            given_order=True,
            validation=0.0,
            skip_bad=True,
            progress=interrupted_after(80),
        )
    with pytest.raises(DataError, match="--skip-bad"):
        put(images, tmp_path / "two", **options)


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("trouble", examples(["interrupt"], ["interrupt", "bad"]))
def test_workers_do_not_finish_their_files_for_nothing(tmp_path: Path, trouble: str) -> None:
    """Each of the two would need 90 seconds for its file, of 120 blocks, of 1 MiB each."""
    per_file = 120 * 64
    images = Numbered(2 * per_file, block=1, bad=frozenset({per_file + 5} if trouble == "bad" else ()))
    images.shape, images.pause = (64, 64, 1), 0.75
    wanted: Any = KeyboardInterrupt if trouble == "interrupt" else DataError
    tell = interrupted_after(0) if trouble == "interrupt" else None
    with pytest.raises(wanted):
        put(images, tmp_path / "out", workers=2, file_bytes=4 * 64 * 64 * per_file, given_order=True, validation=0.0, progress=tell)


def test_two_packings_do_not_work_in_one_directory(tmp_path: Path) -> None:
    """The second is refused while the first works, whatever it would pack; afterwards it may."""

    def intrude(_: str, done: int, __: int) -> None:
        if done == 50:
            with pytest.raises(DataError, match="another packing is at work in"):
                put(Numbered(30, block=1), tmp_path / "out", file_bytes=240)

    put(Numbered(100, block=1), tmp_path / "out", file_bytes=240, progress=intrude)
    assert sum(map(len, contents(tmp_path / "out").values())) == 100


def test_places_where_nothing_can_be_packed_are_named(tmp_path: Path) -> None:
    (tmp_path / "in" / "a").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "in" / "a" / "0.png")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="which it would become a part of"):
        pack(tmp_path / "in", tmp_path / "in" / "out", validation=0.0)
    with pytest.raises(DataError, match=r"is a link to .*nowhere, which is not there"):
        pack(tmp_path / "in", tmp_path / "gone", validation=0.0)
    assert sorted(entry.name for entry in (tmp_path / "in").iterdir()) == ["a"]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.int64, np.uint64])
def test_integers_that_float32_would_round_are_named(tmp_path: Path, dtype: Any) -> None:
    values = np.arange(40).reshape(10, 2, 2).astype(dtype) + 16777200
    np.save(tmp_path / "i.npy", values)
    with pytest.raises(DataError, match="has the value 16777217; float32 would round it, which --dtype float32 allows"):
        pack(tmp_path / "i.npy", tmp_path / "out", validation=0.0, given_order=True)
    pack(tmp_path / "i.npy", tmp_path / "out", validation=0.0, given_order=True, dtype="float32")
    found = PackedDataset.open(tmp_path / "out").part("train").read(0, 10)[0]
    assert (found[..., 0] == values.astype(np.float32)).all()


def test_wide_integers_become_bytes_with_a_scale(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.linspace(0, 4095, 40).reshape(10, 2, 2).astype(np.uint16))
    manifest = pack(tmp_path / "i.npy", tmp_path / "out", validation=0.0, given_order=True, dtype="uint8", scale=(0.0, 4095.0))
    found = PackedDataset.open(tmp_path / "out").part("train").read(0, 10)[0]
    assert manifest.scale == (0.0, 255.0)
    assert np.abs(found.reshape(-1) - np.linspace(0, 255, 40)).max() < 1


@pytest.mark.parametrize(
    ("kind", "low", "high"), [("signed bytes", -120, 120), ("text", -0.5, 0.5), ("text of integers", 0, 1000), ("png", 0, 65535)]
)
def test_whatever_holds_numbers_becomes_bytes_with_a_scale(tmp_path: Path, kind: str, low: float, high: float) -> None:
    values = np.linspace(low, high, 40).reshape(10, 2, 2)
    source = tmp_path / {"signed bytes": "i.npy", "png": "pictures"}.get(kind, "m.txt")
    if kind == "signed bytes":
        np.save(source, np.rint(values).astype(np.int8))
    elif kind == "png":
        source.mkdir()
        for number, one in enumerate(values):
            Image.fromarray(one.astype(np.uint16)).save(source / f"{number}.png")
    else:
        written = "%d" if "integers" in kind else "%.18e"
        source.write_text("\n".join("\n".join(" ".join(written % value for value in row) for row in one) + "\n" for one in values))
    manifest = pack(source, tmp_path / "out", validation=0.0, given_order=True, dtype="uint8", scale=(low, high))
    found = PackedDataset.open(tmp_path / "out").part("train").read(0, 10)[0]
    assert (manifest.dtype, manifest.scale) == ("uint8", (0.0, 255.0))
    assert np.abs(found.reshape(-1) - np.linspace(0, 255, 40)).max() <= 1


@pytest.mark.parametrize("other", [np.int8, np.int16])
def test_a_scale_for_bytes_is_not_for_bytes_beside_other_numbers(tmp_path: Path, other: Any) -> None:
    np.save(tmp_path / "a.npy", np.full((10, 2, 2), 100, np.uint8))
    np.save(tmp_path / "b.npy", np.full((10, 2, 2), 100, other))
    for train, held in ("ab", "ba"):
        with pytest.raises(DataError, match=r"the parts are of u?int.* and u?int.*; convert one of them"):
            pack(tmp_path / f"{train}.npy", tmp_path / "out", validation=tmp_path / f"{held}.npy", dtype="uint8", scale=(0, 500))


@pytest.mark.parametrize(
    ("change", "portable"),
    [
        *(({"seed": 9}, portable) for portable in (True, False)),
        *(({"labels": 1}, portable) for portable in (True, False)),
        ({"file_bytes": 120}, True),
        ({"dtype": "float16"}, True),
        ({"first": 7}, True),
    ],
)
def test_another_plan_starts_anew(tmp_path: Path, change: dict[str, Any], portable: bool) -> None:
    options = {"file_bytes": 240, **change}
    before, images = Numbered(100, block=1), Numbered(100, block=1, first=options.pop("first", 0))
    before.portable = images.portable = portable
    images.labels = (images.labels + options.pop("labels", 0)) % 5
    with pytest.raises(KeyboardInterrupt):
        put(before, tmp_path / "out", file_bytes=240, progress=interrupted_after(50))
    put(images, tmp_path / "out", **options)
    put(images, tmp_path / "fresh", **options)
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 1, "a": 2}),
        ([[1], [2]], [[1, 2]]),
        ([b"ab", b"c"], [b"a", b"bc"]),
        (np.arange(4), np.arange(1, 5)),
        (np.zeros(8, np.uint8), bytes(8)),
        (Numbered(9, block=1), Numbered(9, block=3)),
        ({"inner": Numbered(9, block=1)}, {"inner": Numbered(9, block=1, bad=frozenset({2}))}),
        ("é", "e"),
    ],
)
def test_what_differs_in_anything_has_another_fingerprint(one: object, other: object) -> None:
    def fingerprint(value: object) -> str:
        digest = hashlib.sha256()
        feed(digest, value)
        return digest.hexdigest()

    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(copy.deepcopy(one))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["begin", "write"])
def test_a_killed_packing_leaves_no_workers_and_can_go_on(tmp_path: Path, moment: str) -> None:
    """Killed with SIGKILL while two workers begin or write: they end with it, or the pipes that they hold would stay open."""
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal, time
        from pathlib import Path
        from tests.data.test_packing import Numbered, put

        calls = []

        def kill(what, done, total):
            calls.append(done)
            if done > 100 or ({moment!r} == "begin" and len(calls) == 3):
                os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            put(Numbered(400, block=1), Path({str(tmp_path / "out")!r}), workers=2, file_bytes=24, progress=kill)
        elif {moment!r} == "begin":
            time.sleep(2)
        """)
    )
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=rank_environ()) as packing:
        assert packing.wait(HANGS) == -9
        try:
            packing.communicate(timeout=HANGS)
        except subprocess.TimeoutExpired:
            pytest.fail("workers outlived the process that began them")
    put(Numbered(400, block=1), tmp_path / "out", file_bytes=24)
    assert sorted(value for part in contents(tmp_path / "out").values() for value, _ in part) == list(range(400))


def test_a_disk_that_fills_is_named_and_the_packing_goes_on_afterwards(tmp_path: Path) -> None:
    """The limit on the size of a file stands for the full disk: the system answers a write in the same way."""
    np.save(tmp_path / "i.npy", np.arange(40000, dtype=np.uint16).astype(np.uint8).reshape(100, 20, 20))
    command = [sys.executable, "-m", "deepex", "data", "pack", str(tmp_path / "i.npy"), str(tmp_path / "out"), "--validation", "0"]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))

    done = subprocess.run(command, check=False, capture_output=True, text=True, preexec_fn=limit, timeout=HANGS)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "MB are free there" in done.stderr
    assert "Traceback" not in done.stderr
    assert subprocess.run(command, check=False, capture_output=True, timeout=HANGS).returncode == 0
    assert PackedDataset.open(tmp_path / "out").verify() == []


def test_a_disk_that_fills_with_the_list_of_what_was_skipped_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Numbered(20, block=1, bad=frozenset({7}))

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if "skipped.txt" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        opened = Path.open
        patch.setattr(Path, "open", full)
        with pytest.raises(StorageError, match=r"cannot write .*skipped\.txt: No space left"):
            put(source, tmp_path / "out", skip_bad=True)
    put(source, tmp_path / "out", skip_bad=True)
    assert (tmp_path / "out" / "skipped.txt").read_text().count("is broken") == 1


def test_what_a_kill_left_of_the_list_of_what_was_skipped_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "out" / ".packing").mkdir(parents=True)
    for name in ("skipped.txt", ".skipped.txt.part"):
        (tmp_path / "out" / name).touch()
    put(Numbered(20, block=1), tmp_path / "out")
    assert not list((tmp_path / "out").glob("*skipped*"))


def test_compressed_files_are_read_like_others(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.arange(100 * 6).reshape(100, 2, 3) % 7)
    pack(tmp_path / "i.npy", tmp_path / "plain", file_bytes=100)
    pack(tmp_path / "i.npy", tmp_path / "small", file_bytes=100, compress=True)
    plain, small = (PackedDataset.open(tmp_path / name) for name in ("plain", "small"))
    for part in ("train", "validation"):
        count = plain.part(part).count
        assert (plain.part(part).read(0, count)[0] == small.part(part).read(0, count)[0]).all()
        picked = np.array([count - 1, 0, 3, 3])
        out = np.empty((4, 2, 3, 1), np.uint8), np.empty(4, np.int64)
        small.part(part).gather(picked, *out)
        assert (out[0] == plain.part(part).read(0, count)[0][picked]).all()
    assert small.verify() == []
    path = tmp_path / "small" / "train-00000.npy.xz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"train-00000\.npy\.xz is not a whole compressed array file"):
        PackedDataset.open(tmp_path / "small").part("train").read(0, 5)


def test_real_numbers_become_bytes_only_with_a_scale(tmp_path: Path) -> None:
    np.save(tmp_path / "i.npy", np.linspace(-1, 1, 40).reshape(10, 2, 2))
    with pytest.raises(DataError, match="--scale LOW HIGH"):
        pack(tmp_path / "i.npy", tmp_path / "out", dtype="uint8")
    manifest = pack(tmp_path / "i.npy", tmp_path / "out", dtype="uint8", scale=(-1, 1), validation=0, given_order=True)
    images, _ = PackedDataset.open(tmp_path / "out").part("train").read(0, 10)
    assert (images.reshape(-1) == np.rint(np.linspace(0, 255, 40))).all()
    assert manifest.scale == (0.0, 255.0)
    with pytest.raises(DataError, match=r"sample \d+: has the value .*--scale -0.5 1"):
        pack(tmp_path / "i.npy", tmp_path / "narrow", dtype="uint8", scale=(-0.5, 1))


def test_arrays_are_resized_cropped_and_replicated(tmp_path: Path) -> None:
    images = np.zeros((6, 8, 12), np.uint8)
    images[:, :, 6:] = 200
    np.save(tmp_path / "i.npy", images)
    manifest = pack(tmp_path / "i.npy", tmp_path / "out", resize=4, crop=(4, 2), channels=3, validation=0)
    assert manifest.shape == (3, 4, 2)
    packed, _ = PackedDataset.open(tmp_path / "out").part("train").read(0, 6)
    assert (packed[:, :, 0] < 60).all()
    assert (packed[:, :, 1] > 140).all()
    assert (packed[..., :1] == packed).all()


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 40))
def test_the_moments_of_bytes_are_exact(seed: int, channels: int, rows: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, (3, rows, 50, channels), np.uint8)
    values[:, :, :, 0] = np.where(values[:, :, :, 0] > 128, 255, 0)
    moments, joined = Moments(channels), Moments(channels)
    moments.add(values)
    for block in values:
        other = Moments(channels)
        other.add(block[None])
        joined.join(Moments.from_json(other.to_json()))
    flat = values.reshape(-1, channels).astype(np.float64) / 255
    for found in (moments.scaled(0, 255), joined.scaled(0, 255)):
        assert np.allclose(found[0], flat.mean(0), rtol=0, atol=1e-12)
        deviation = flat.std(0)
        assert np.allclose(found[1], np.where(deviation > 0, deviation, 1.0), rtol=0, atol=1e-12)


def test_the_moments_of_many_bright_bytes_are_exact() -> None:
    """Sums of their squares pass 2^24, from where on float32 has no odd numbers."""
    values = np.random.default_rng(0).integers(251, 256, (1, 3000, 64, 1), np.uint8)
    moments = Moments(1)
    moments.add(values)
    (mean,), (deviation,) = moments.scaled(0, 1)
    exact = values.astype(np.int64)
    variance = Fraction(int((exact**2).sum()), exact.size) - Fraction(int(exact.sum()), exact.size) ** 2
    assert mean == pytest.approx(exact.sum() / exact.size, rel=1e-14)
    assert deviation == pytest.approx(float(variance) ** 0.5, rel=1e-11)


def test_the_least_and_the_greatest_value_are_those_of_all_files() -> None:
    joined = Moments(1)
    for values in ((3.0, 5.0), (1.0, 4.0), (2.0, 9.0)):
        one = Moments(1)
        one.add(np.array(values, np.float32).reshape(2, 1, 1, 1))
        joined.join(one)
    assert (joined.low, joined.high) == (1.0, 9.0)


def test_a_directory_left_by_a_packing_of_another_kind_is_cleared(tmp_path: Path) -> None:
    put(Numbered(30, block=1), tmp_path / "out", file_bytes=24)
    shutil.rmtree(tmp_path / "out" / "none", ignore_errors=True)
    pack_source(
        Source(train=Numbered(30, block=1)), Site(tmp_path / "out"), PackConfig(dtype="float32"), command="", overwrite=True
    )
    assert sorted(path.name for path in (tmp_path / "out").glob("*.npy")) == [
        "train-00000-labels.npy",
        "train-00000.npy",
        "validation-00000-labels.npy",
        "validation-00000.npy",
    ]
