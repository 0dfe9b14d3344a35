"""`python -m deepex.study.frameworks NAME --config FILE.toml --out DIR`."""

from deepex.study.frameworks.program import main

if __name__ == "__main__":
    main()
