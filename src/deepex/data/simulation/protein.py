"""A 28-residue fast folder with one bead per residue: its native structure and its force field.

    openmm = require_openmm()
    context = openmm.Context(build_system(), openmm.LangevinMiddleIntegrator(325, 1.0, 0.015))

The sequence is that of FSD-1 (Dahiyat & Mayo, Science 278, 82, 1997; PDB 1FSD), whose β-β-α fold is that of a zinc finger without
the zinc. The force field is the structure-based Cα model of Clementi, Nymeyer & Onuchic (J. Mol. Biol. 298, 937, 2000): bonds,
angles and dihedrals with their minimum in the native structure, a 12-10 attraction for each native contact, repulsion for all
other pairs. Two additions make so small a protein fold in two states, where the plain model slides downhill:
- the desolvation barrier of Cheung, García & Onuchic (PNAS 99, 685, 2002), a Gaussian half a water molecule beyond each contact;
- contacts between hairpin and helix count 1.5 times, for the side chains of the core that one bead per residue does not have.
Lengths are in Å and energies in units of `EPSILON` until they reach OpenMM, which takes nm and kJ/mol.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepex.errors import DataError

SEQUENCE = "QQYTAKIKGRTFRNEKELRDFIEKFKGR"
HAIRPIN = range(12)  # with the turn K8-G9; residues are numbered from 0 in code
HELIX = range(16, 28)
CORE = (2, 4, 6, 11, 17, 20, 21, 24)  # Y3 A5 I7 F12 L18 F21 I22 F25

CUTOFF = 8.0  # Å between two Cα that are in contact
CORE_CUTOFF = 12.0  # Å between two Cα of core residues, whose large side chains reach that far
APART = 4  # residues along the chain from which on a pair can be a contact; nearer ones are held by angles and dihedrals

EPSILON = 2.65  # kJ/mol: puts the folding temperature at about 325 K
BOND, ANGLE, DIHEDRAL = 100.0, 20.0, 1.0  # EPSILON per Å², per rad², and EPSILON; the threefold dihedral term has half
BETWEEN = 1.5  # EPSILON, a contact between hairpin and helix; any other has 1
BARRIER, BARRIER_PLACE, BARRIER_WIDTH = 1.0, 1.5, 0.6  # EPSILON, then Å beyond the contact, and Å
REPULSION = 4.0  # Å
MASS = 123.9  # daltons, the mean of the residues of this sequence

# Cα in Å: an idealised model of the fold, NOT the coordinates of the PDB. Made once, from ideal geometry alone: a whole backbone
# (N, Cα, C, O, Cβ; standard bond lengths and angles, trans peptides) with the torsions φ, ψ as its only freedom, started from
# strands 2-7 and 10-13 (-115°, 135°), a type I' turn 8-9 (55°, 38°; 78°, 20°) and helix 15-26 (-62°, -42°), and minimised (Adam,
# then L-BFGS) over: distance from these torsions, hydrogen bonds 7:10, 5:12, 3:14 and i:i+4 in the helix, no overlap of atoms,
# allowed φ for all but the turn and Gly, attraction of the core's side-chain centroids, radius of gyration near 9.2 Å. Of 24
# starts with other loop torsions (13-15), 7 ended within 0.15 Å of each other in the lowest minimum, which is this one. Radius of
# gyration 9.15 Å; residues three or more apart keep 4.5 Å.
NATIVE: NDArray[np.float64] = np.array(
    [
        [-8.58, 10.37, -2.36], [-8.11, 6.77, -1.20], [-6.82, 3.88, -3.33], [-7.46, 0.16, -2.85],
        [-4.51, -2.23, -3.11], [-4.36, -6.01, -2.67], [-1.13, -7.45, -1.27], [-0.45, -10.76, 0.48],
        [-4.14, -11.64, 0.12], [-4.88, -8.51, 2.16], [-7.03, -5.59, 1.02], [-6.19, -2.02, 2.05],
        [-8.53, 0.95, 1.67], [-6.17, 3.91, 2.11], [-3.77, 6.11, 0.14], [-1.14, 6.81, 2.80],
        [-1.02, 3.14, 3.78], [-0.27, 2.09, 0.19], [2.45, 4.74, -0.16], [4.19, 3.52, 3.00],
        [4.09, -0.10, 1.82], [5.54, 0.80, -1.58], [8.36, 2.80, 0.01], [9.28, -0.06, 2.36],
        [9.15, -2.62, -0.45], [11.48, -0.52, -2.61], [14.10, -0.41, 0.16], [15.92, 1.89, -2.27],
    ]
)  # fmt: skip
NATIVE.flags.writeable = False


def require_openmm() -> Any:
    """Import OpenMM, or say how to get it."""
    try:
        import openmm
    except ImportError as error:
        raise DataError(f"simulating a protein needs OpenMM ({error}); pip install 'deepex[science]'") from error
    return openmm


def distances(positions: NDArray[np.float64]) -> NDArray[np.float64]:
    """All distances between the beads of one structure."""
    vectors = positions[:, np.newaxis] - positions
    apart: NDArray[np.float64] = np.sqrt((vectors**2).sum(axis=-1))
    return apart


def native_pairs() -> list[tuple[int, int]]:
    """The native contacts that a contact map shows: Cα under the cut-off, four or more residues apart."""
    return [pair for pair in _pairs() if distances(NATIVE)[pair] < CUTOFF]


def contact_strengths() -> dict[tuple[int, int], float]:
    """The contacts that attract, in units of EPSILON: those of the map, and those of side chains in the core."""
    apart = distances(NATIVE)
    core = [pair for pair in _pairs() if set(pair) <= set(CORE) and CUTOFF <= apart[pair] < CORE_CUTOFF]
    return {(i, j): BETWEEN if i in HAIRPIN and j in HELIX else 1.0 for i, j in sorted(native_pairs() + core)}


def build_system() -> Any:
    """The `openmm.System` of the protein: bonds, angles, dihedrals, contacts and repulsion are its force groups 0 to 4."""
    openmm = require_openmm()
    system = openmm.System()
    for _ in SEQUENCE:
        system.addParticle(MASS)
    makers = (_bonds, _angles, _dihedrals, _contacts, _repulsion)
    for group, make in enumerate(makers):
        force = make(openmm)
        force.setForceGroup(group)
        system.addForce(force)
    return system


def build_topology() -> Any:
    """The `openmm.app.Topology` of the protein: one chain of Cα atoms."""
    require_openmm()
    from openmm.app import Element, Topology

    topology = Topology()
    chain = topology.addChain("A")
    for letter in SEQUENCE:
        topology.addAtom("CA", Element.getBySymbol("C"), topology.addResidue(_RESIDUE_NAMES[letter], chain))
    return topology


_RESIDUE_NAMES = {
    "A": "ALA", "D": "ASP", "E": "GLU", "F": "PHE", "G": "GLY", "I": "ILE", "K": "LYS",
    "L": "LEU", "N": "ASN", "Q": "GLN", "R": "ARG", "T": "THR", "Y": "TYR",
}  # fmt: skip


def _pairs() -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(SEQUENCE)) for j in range(i + APART, len(SEQUENCE))]


def _bonds(openmm: Any) -> Any:
    force = openmm.HarmonicBondForce()
    for i, length in enumerate(np.linalg.norm(np.diff(NATIVE, axis=0), axis=1)):
        force.addBond(i, i + 1, length / 10, 2 * BOND * EPSILON * 100)  # OpenMM's energy has a half in front
    return force


def _angles(openmm: Any) -> Any:
    force = openmm.HarmonicAngleForce()
    for i in range(len(NATIVE) - 2):
        back, ahead = NATIVE[i] - NATIVE[i + 1], NATIVE[i + 2] - NATIVE[i + 1]
        angle = np.arccos(back @ ahead / np.linalg.norm(back) / np.linalg.norm(ahead))
        force.addAngle(i, i + 1, i + 2, float(angle), 2 * ANGLE * EPSILON)
    return force


def _dihedrals(openmm: Any) -> Any:
    """K (1 - cos(φ - φ₀)) + K/2 (1 - cos 3(φ - φ₀)); OpenMM has a plus, hence the π."""
    force = openmm.PeriodicTorsionForce()
    for i in range(len(NATIVE) - 3):
        first, middle, last = np.diff(NATIVE[i : i + 4], axis=0)
        before, after = np.cross(first, middle), np.cross(middle, last)
        angle = float(np.arctan2(np.linalg.norm(middle) * first @ after, before @ after))
        for fold, share in ((1, 1.0), (3, 0.5)):
            force.addTorsion(i, i + 1, i + 2, i + 3, fold, fold * angle + np.pi, share * DIHEDRAL * EPSILON)
    return force


def _contacts(openmm: Any) -> Any:
    force = openmm.CustomBondForce(
        "energy * (5*square^6 - 6*square^5 + barrier * exp(-((r - native - place) / width)^2)); square = (native / r)^2"
    )
    force.addPerBondParameter("energy")
    force.addPerBondParameter("native")
    for name, value in (("barrier", BARRIER), ("place", BARRIER_PLACE / 10), ("width", BARRIER_WIDTH / 10)):
        force.addGlobalParameter(name, value)
    apart = distances(NATIVE)
    for (i, j), strength in contact_strengths().items():
        force.addBond(i, j, [strength * EPSILON, apart[i, j] / 10])
    return force


def _repulsion(openmm: Any) -> Any:
    """A list of pairs: without a neighbour list, 28 beads go four times as fast as with a CustomNonbondedForce."""
    force = openmm.CustomBondForce(f"{EPSILON} * ({(REPULSION / 10) ** 2} / (r * r))^6")
    contacts = contact_strengths()
    for i, j in _pairs():
        if (i, j) not in contacts:
            force.addBond(i, j, [])
    return force
