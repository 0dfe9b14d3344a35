"""`mpiexec -n 4 python -m deepex.study.transfer --out FILE`."""

from deepex.study.transfer.measure import main

main()
