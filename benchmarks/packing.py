"""Packing JPEG files: the rate against bare decoding, what a second core brings, and the memory it takes.

    python benchmarks/packing.py

The files are JPEGs (quality 90, 4:2:0) with the spectrum of photographs, of 500×375 and of 1000×750 pixels. The bare loop reads
each file and decodes it whole with libjpeg-turbo (simplejpeg), on one core, and throws the pixels away. Packing does all of its
work: it reads, decodes at the smallest sufficient scale (1 for the smaller, 1/2 for the larger), resizes the shorter side to 256,
crops 224×224, sums the moments, takes the SHA-256 and writes; its rate is that of `write_file`, the work of one worker on one
file of the dataset. What stands between the two is shown for the smaller: a loop that decodes, resizes with the same kernel and
takes the SHA-256, and keeps nothing, is the most that packing could reach. The rates on two cores are of the whole command on
500×375, start included, with one worker and with two; the most that the machine gives is what two processes of the bare loop reach
together.
Memory is the peak resident set of a process that packs (VmHWM), for as many images and for four times as many.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import simplejpeg

import bench
from deepex.data.geometry import Geometry
from deepex.data.packing.form import Form
from deepex.data.packing.writer import FileTask, write_file
from deepex.data.source.folder import find_images
from deepex.data.source.image import ImageFiles

IMAGES, PER_FILE, MANY = 480, 120, 18000
SIZES = ((375, 500), (750, 1000))
SMALLER = "500×375"
GEOMETRY = Geometry(resize=256, crop=(224, 224))


def photograph(random: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Coloured noise whose power falls with the square of the frequency and more, as that of photographs does."""
    rows, columns = np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = np.inf

    def field(power: float) -> np.ndarray:
        parts = random.standard_normal((2, height, width // 2 + 1))
        values = np.fft.irfft2((parts[0] + 1j * parts[1]) / frequency**power, (height, width))
        return values / values.std()

    luma, blue, red = 128 + 50 * field(1.2), 20 * field(1.6), 20 * field(1.6)
    return np.stack([luma + 1.4 * red, luma - 0.34 * blue - 0.71 * red, luma + 1.77 * blue], -1).clip(0, 255).astype(np.uint8)


def make_files(folder: Path, size: tuple[int, int]) -> list[Path]:
    """Some JPEG files in two classes; the content of 60 is repeated, under names of their own."""
    from PIL import Image

    random = np.random.default_rng(0)
    for label in "ab":
        (folder / label).mkdir(parents=True)
    paths = [folder / "ab"[k % 2] / f"{k:05d}.jpg" for k in range(IMAGES)]
    for k, path in enumerate(paths):
        if k < 60:
            Image.fromarray(photograph(random, *size)).save(path, quality=90, subsampling=2)
        else:
            path.write_bytes(paths[k % 60].read_bytes())
    return paths


def link(paths: list[Path], folder: Path, count: int) -> list[Path]:
    """Give the same files `count` names in one folder."""
    folder.mkdir()
    names = [folder / f"{k:06d}.jpg" for k in range(count)]
    for k, name in enumerate(names):
        name.hardlink_to(paths[k % len(paths)])
    return names


def decode_all(paths: list[Path]) -> float:
    """Seconds to read and decode files, and nothing else."""
    began = perf_counter()
    for path in paths:
        simplejpeg.decode_jpeg(path.read_bytes())
    return perf_counter() - began


def least(paths: list[Path]) -> float:
    """Seconds to read, decode, resize and crop files and to take the SHA-256 of the pixels, and nothing else."""
    memory = np.empty(SIZES[0][0] * SIZES[0][1] * 3, np.uint8)
    digest = hashlib.sha256()
    began = perf_counter()
    for path in paths:
        pixels = GEOMETRY.apply(simplejpeg.decode_jpeg(path.read_bytes(), buffer=memory))
        digest.update(np.ascontiguousarray(pixels).data)
    return perf_counter() - began


def one_core(folder: Path, scratch: Path, paths: list[Path], repeats: int) -> dict[str, Any]:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    images = ImageFiles(find_images(folder)[0], geometry=GEOMETRY)
    some = np.random.default_rng(1).permutation(IMAGES)[:PER_FILE]
    task = FileTask(key="train", stem="train-00000", directory=scratch, order=some)
    chosen = [paths[k] for k in sorted(some)]

    def ours() -> float:
        began = perf_counter()
        write_file(images, task, Form(dtype="uint8"), lambda _: None)
        return perf_counter() - began

    contestants = {"bare": lambda: decode_all(chosen), "ours": ours}
    if folder.name == SMALLER:
        contestants["least"] = lambda: least(chosen)
    times = bench.in_turns(contestants, repeats)
    os.sched_setaffinity(0, cores)
    found: dict[str, Any] = {"rate over bare decoding": bench.ratio(times["bare"], times["ours"])}
    if "least" in times:
        found["decoding, resizing and SHA-256 over bare decoding"] = bench.ratio(times["bare"], times["least"])
    return {**found, "bare_images_per_second": PER_FILE / bench.fast(times["bare"]), "seconds": times}


def two_cores(folder: Path, scratch: Path, paths: list[Path], repeats: int) -> dict[str, Any]:
    """Of the whole command, each in a process of its own, and of bare decoding in one and in two processes that have started."""
    times: dict[str, list[float]] = {name: [] for name in ("bare 1", "bare 2", "ours 1", "ours 2")}
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(decode_all, [paths[:2], paths[2:4]]))  # start both
        for _ in range(repeats):
            for workers in (1, 2):
                began = perf_counter()
                list(pool.map(decode_all, [paths[k::workers] for k in range(workers)]))
                times[f"bare {workers}"].append(perf_counter() - began)
                words = ["data", "pack", str(folder), str(scratch / "packed"), "--resize", "256", "--crop", "224"]
                began = perf_counter()
                command = [sys.executable, "-m", "deepex", *words, "--workers", str(workers), "--overwrite"]
                subprocess.run(command, check=True, capture_output=True)
                times[f"ours {workers}"].append(perf_counter() - began)
    return {
        "two workers over one": bench.ratio(times["ours 1"], times["ours 2"]),
        "bare decoding, two processes over one": bench.ratio(times["bare 1"], times["bare 2"]),
        "seconds": times,
    }


MEMORY_SCRIPT = """
import sys
from pathlib import Path
from deepex.data.pack import pack
pack(sys.argv[1], sys.argv[2], resize=256, crop=(224, 224), validation=0.0)
for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith("VmHWM"):
        print(int(line.split()[1]) * 1024)
"""


def memory(scratch: Path, paths: list[Path]) -> dict[str, Any]:
    peaks = {}
    for count in (2 * IMAGES, 8 * IMAGES):
        folder = scratch / f"many-{count}"
        link(paths, folder, count)
        command = [sys.executable, "-c", MEMORY_SCRIPT, str(folder), str(scratch / f"packed-{count}")]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        peaks[count] = int(done.stdout)
    return {f"peak bytes for {count} images of {224 * 224 * 3 * count / 1e6:.0f} MB": peak for count, peak in peaks.items()}


def main() -> None:
    options = bench.arguments("packing JPEG files", repeats=20)
    with tempfile.TemporaryDirectory(prefix="deepex-packing-") as name:
        scratch = Path(name)
        result: dict[str, Any] = {}
        for height, width in reversed(SIZES):
            folder = scratch / f"{width}×{height}"
            paths = make_files(folder, (height, width))
            result[f"one core, {width}×{height}"] = one_core(folder, scratch, paths, options.repeats)
        many = link(paths, scratch / "many", MANY)
        result["two cores"] = two_cores(scratch / "many", scratch, many, 3)
        result["memory"] = memory(scratch, paths)
    rows = [
        *(
            (f"images/s of packing over bare decoding, {what} (aim: at least 0.9)", found["rate over bare decoding"])
            for what, found in result.items()
            if what.startswith("one core")
        ),
        (
            "… decoding, resizing and SHA-256 alone over bare decoding: the most that packing could reach",
            result[f"one core, {SMALLER}"]["decoding, resizing and SHA-256 over bare decoding"],
        ),
        ("images/s with two workers over one (aim: at least 1.8)", result["two cores"]["two workers over one"]),
        ("… the most that the machine gave", result["two cores"]["bare decoding, two processes over one"]),
    ]
    bench.print_table("packing JPEG files", ("what", bench.LEGEND), [(what, bench.show_ratio(found)) for what, found in rows])
    print(json.dumps(result["memory"], indent=1))
    bench.write_record("packing", result, keep=options.keep)


if __name__ == "__main__":
    main()
