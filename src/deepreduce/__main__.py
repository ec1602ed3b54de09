"""`python -m deepreduce`: the command line, where its script is not on the path."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
