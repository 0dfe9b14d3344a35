"""`mpiexec -n 4 python -P -m deepex.study.transfer --out FILE`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))  # the current directory: a random.py or torch.py there is not ours
    from deepex.comm.early import load_mpi
    from deepex.machine.heap import loading

    load_mpi()
    with loading():
        from deepex.study.transfer.measure import main

    main()
