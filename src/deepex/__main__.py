"""`python -m deepex` is `deepex`."""

from deepex.cli import main

if __name__ == "__main__":
    main()
