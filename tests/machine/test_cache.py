"""Where compiled code is kept: the user's choice, the user's cache, and apart for each kind of processor."""

import tempfile
from pathlib import Path

from deepex.machine.cache import INDUCTOR_VARIABLE, keep_compiled


def make_root(folder: Path, flags: str) -> Path:
    (folder / "proc").mkdir(parents=True)
    text = f"processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: {flags}\ncpu MHz\t\t: 2400\n\nprocessor\t: 1\n"
    (folder / "proc/cpuinfo").write_text(text)
    return folder


def test_the_users_directory_goes_first(tmp_path: Path) -> None:
    environ = {INDUCTOR_VARIABLE: "/mine", "XDG_CACHE_HOME": str(tmp_path)}
    assert keep_compiled(environ) == "/mine"
    assert environ[INDUCTOR_VARIABLE] == "/mine"
    assert not list(tmp_path.iterdir())


def test_what_inductor_chose_on_import_is_not_the_users_choice(tmp_path: Path) -> None:
    environ = {INDUCTOR_VARIABLE: f"{tempfile.gettempdir()}/torchinductor_me", "XDG_CACHE_HOME": str(tmp_path)}
    found = keep_compiled(environ)
    assert found is not None
    assert Path(found).is_relative_to(tmp_path)
    assert environ[INDUCTOR_VARIABLE] == found


def test_each_kind_of_processor_has_its_own(tmp_path: Path) -> None:
    found = []
    for name, flags in (("a", "avx2"), ("b", "avx2 avx512f"), ("c", "avx2")):
        environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        found.append(keep_compiled(environ, make_root(tmp_path / name, flags)))
        assert environ[INDUCTOR_VARIABLE] == found[-1]
    assert found[0] == found[2] != found[1]
    assert found[0] is not None
    assert Path(found[0]).is_dir()
    assert Path(found[0]).parent == tmp_path / "cache/deepex/inductor"


def test_a_cache_that_cannot_be_made_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    assert keep_compiled(environ) is None
    assert INDUCTOR_VARIABLE not in environ
