"""The 27 crystals of the diffraction benchmark, and thin slabs cut from them along a zone axis.

    atoms = slab(CRYSTALS[0], (40.0, 40.0, 100.0), orientation=Orientation(rotation=0.1), displacement=0.08, rng=rng)

Some are hard neighbours: other elements on nearly the same lattice (Al, Ag and Au; Mo and W; Si and ZnS; CaF2 and CeO2; Mg and
GaN), the same crystal along another axis (Al, Au, Cu, W), the same formula in another structure (rutile and anatase).
Lattice constants are values at room temperature in Å. NBS: the powder standards of Swanson et al., Circular 539 of the National
Bureau of Standards (1953 to 1960), to three places; others are named where they stand.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Crystal:
    """A crystal by its space group, its lattice (a, c in Å; γ in degrees) and its inequivalent atoms, seen along `zone` [uvw]."""

    name: str
    space_group: int
    a: float
    c: float | None = None  # a where None
    gamma: float = 90.0
    basis: tuple[tuple[str, Vector], ...]
    zone: tuple[int, int, int]

    @cached_property
    def unit_cell(self) -> Any:
        """The conventional cell, as ase.Atoms."""
        from ase.spacegroup import crystal

        symbols, places = zip(*self.basis, strict=True)
        lattice = [self.a, self.a, self.c or self.a, 90.0, 90.0, self.gamma]
        return crystal(symbols, basis=places, spacegroup=self.space_group, cellpar=lattice)


@dataclass(frozen=True, kw_only=True)
class Orientation:
    """How a slab lies in the beam: turned in its plane by `rotation`, then tilted about x and y (all in radians)."""

    rotation: float = 0.0
    tilt: tuple[float, float] = (0.0, 0.0)


UPRIGHT = Orientation()
_MARGIN = 1.0  # Å around the box from which a displaced atom may enter it


def slab(
    crystal: Crystal,
    box: Vector,
    *,
    orientation: Orientation = UPRIGHT,
    displacement: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Any:
    """Cut `box` (Å) out of the oriented crystal, as ase.Atoms.

    With `rng` the origin of the lattice lies anywhere, and every atom is displaced by a Gaussian of `displacement` Å rms per axis;
    without, the crystal is ideal and a lattice point is at the centre of the box.
    """
    from ase import Atoms

    cell = crystal.unit_cell
    lattice = cell.cell.array @ _rotation(cell.cell.array, crystal.zone, orientation).T
    centre = np.array(box) / 2
    cells = _cells_covering(centre + _MARGIN, lattice)
    basis = cell.get_scaled_positions() + (0.0 if rng is None else rng.random(3))
    places = ((cells[:, None] + basis) @ lattice).reshape(-1, 3)
    near = (np.abs(places) < centre + _MARGIN).all(axis=1)
    places, numbers = places[near] + centre, np.tile(cell.numbers, len(cells))[near]
    if rng is not None:
        places += rng.normal(0.0, displacement, places.shape)
    inside = ((places >= 0.0) & (places < box)).all(axis=1)
    return Atoms(numbers=numbers[inside], positions=places[inside], cell=box, pbc=True)


def _cells_covering(reach: NDArray[Any], lattice: NDArray[Any]) -> NDArray[Any]:
    """Number every unit cell that may touch the box from -reach to +reach: its corners, in units of the lattice, bound them."""
    corners = np.array(list(product((-1.0, 1.0), repeat=3))) * reach @ np.linalg.inv(lattice)
    lowest, highest = np.floor(corners.min(axis=0)).astype(int) - 2, np.ceil(corners.max(axis=0)).astype(int) + 1
    ranges = [np.arange(low, high) for low, high in zip(lowest, highest, strict=True)]
    return np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, 3)


def _rotation(lattice: NDArray[Any], zone: tuple[int, int, int], orientation: Orientation) -> NDArray[Any]:
    """Turn [uvw] onto z and the projection of a (of b where a is nearly along z) onto x, then as `orientation` says."""
    z = np.array(zone) @ lattice
    z /= np.linalg.norm(z)
    side = next(row - row @ z * z for row in lattice if abs(row @ z) < 0.9 * np.linalg.norm(row))
    x = side / np.linalg.norm(side)
    onto = np.stack([x, np.cross(z, x), z])
    cos, sin = np.cos(orientation.rotation), np.sin(orientation.rotation)
    turn = np.array([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]])
    (cx, sx), (cy, sy) = ((np.cos(angle), np.sin(angle)) for angle in orientation.tilt)
    tilt = np.array([[1.0, 0.0, 0.0], [0.0, cx, -sx], [0.0, sx, cx]]) @ np.array([[cy, 0.0, sy], [0.0, 1.0, 0.0], [-sy, 0.0, cy]])
    return np.asarray(tilt @ turn @ onto)


_ORIGIN: Vector = (0.0, 0.0, 0.0)
_HALF: Vector = (0.5, 0.5, 0.5)
_QUARTER: Vector = (0.25, 0.25, 0.25)
_PAIRS: dict[str, tuple[int, Vector, str]] = {  # space group, place of the second element, formula
    "zincblende": (216, _QUARTER, "{}{}"),
    "rock salt": (225, _HALF, "{}{}"),
    "caesium chloride": (221, _HALF, "{}{}"),
    "fluorite": (225, _QUARTER, "{}{}2"),
}


def _element(element: str, space_group: int, a: float, zone: tuple[int, int, int]) -> Crystal:
    structure = {225: "fcc", 229: "bcc", 227: "diamond"}[space_group]
    name = f"{element} {structure} [{''.join(map(str, zone))}]"
    return Crystal(name=name, space_group=space_group, a=a, basis=((element, _ORIGIN),), zone=zone)


def _hexagonal(element: str, a: float, c: float) -> Crystal:
    basis = ((element, (1 / 3, 2 / 3, 0.25)),)
    return Crystal(name=f"{element} hcp [0001]", space_group=194, a=a, c=c, gamma=120.0, basis=basis, zone=(0, 0, 1))


def _pair(structure: str, elements: tuple[str, str], a: float, zone: tuple[int, int, int]) -> Crystal:
    space_group, second, formula = _PAIRS[structure]
    name = f"{formula.format(*elements)} {structure} [{''.join(map(str, zone))}]"
    return Crystal(name=name, space_group=space_group, a=a, basis=((elements[0], _ORIGIN), (elements[1], second)), zone=zone)


def _rutile(name: str, metal: str, a: float, c: float, u: float) -> Crystal:
    basis = ((metal, _ORIGIN), ("O", (u, u, 0.0)))
    return Crystal(name=f"{name} rutile [001]", space_group=136, a=a, c=c, basis=basis, zone=(0, 0, 1))


def _wurtzite(name: str, elements: tuple[str, str], a: float, c: float, u: float) -> Crystal:
    basis = ((elements[0], (1 / 3, 2 / 3, 0.0)), (elements[1], (1 / 3, 2 / 3, u)))
    return Crystal(name=f"{name} wurtzite [0001]", space_group=186, a=a, c=c, gamma=120.0, basis=basis, zone=(0, 0, 1))


CRYSTALS: tuple[Crystal, ...] = (
    _element("Al", 225, 4.049, (0, 0, 1)),  # NBS
    _element("Ag", 225, 4.086, (0, 0, 1)),  # NBS
    _element("Au", 225, 4.079, (0, 0, 1)),  # NBS
    _element("Cu", 225, 3.615, (0, 0, 1)),  # NBS
    _element("Al", 225, 4.049, (0, 1, 1)),
    _element("Au", 225, 4.079, (0, 1, 1)),
    _element("Cu", 225, 3.615, (1, 1, 1)),
    _element("Fe", 229, 2.866, (0, 0, 1)),  # NBS
    _element("Mo", 229, 3.147, (0, 0, 1)),  # NBS
    _element("W", 229, 3.165, (0, 0, 1)),  # NBS
    _element("W", 229, 3.165, (1, 1, 1)),
    _element("Si", 227, 5.431, (0, 1, 1)),  # CODATA
    _element("Ge", 227, 5.658, (0, 1, 1)),  # NBS
    _pair("zincblende", ("Zn", "S"), 5.409, (0, 1, 1)),  # Skinner 1961
    _pair("zincblende", ("In", "P"), 5.870, (0, 1, 1)),  # Vurgaftman et al. 2001
    _pair("rock salt", ("Mg", "O"), 4.213, (0, 0, 1)),  # NBS
    _pair("rock salt", ("Na", "Cl"), 5.640, (0, 0, 1)),  # NBS
    _pair("caesium chloride", ("Cs", "Cl"), 4.123, (0, 0, 1)),  # NBS
    _pair("fluorite", ("Ca", "F"), 5.463, (0, 1, 1)),  # NBS
    _pair("fluorite", ("Ce", "O"), 5.411, (0, 1, 1)),  # NBS
    Crystal(
        name="SrTiO3 perovskite [001]",  # NBS
        space_group=221,
        a=3.905,
        basis=(("Sr", _ORIGIN), ("Ti", _HALF), ("O", (0.5, 0.5, 0.0))),
        zone=(0, 0, 1),
    ),
    _hexagonal("Mg", 3.209, 5.211),  # NBS
    _hexagonal("Ti", 2.950, 4.686),  # NBS
    _rutile("TiO2", "Ti", 4.5937, 2.9587, 0.3048),  # Abrahams and Bernstein 1971
    _rutile("SnO2", "Sn", 4.737, 3.186, 0.306),  # Bolzan et al. 1997
    _wurtzite("GaN", ("Ga", "N"), 3.189, 5.185, 0.377),  # Vurgaftman and Meyer 2003; u: Schulz and Thiemann 1977
    Crystal(
        name="TiO2 anatase [001]",  # Hummer, Heaney and Post 2007; z: Horn, Schwerdtfeger and Meagher 1972
        space_group=141,
        a=3.783,
        c=9.509,
        basis=(("Ti", _ORIGIN), ("O", (0.0, 0.0, 0.208))),
        zone=(0, 0, 1),
    ),
)
