"""`python -P -m deepex.study.frameworks NAME --config FILE.toml --out DIR`."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.append(sys.path.pop(0))  # the current directory: a random.py or torch.py there is not ours
    from deepex.study.frameworks.program import main

    main()
