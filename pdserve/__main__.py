"""`python -m pdserve` is the same as the console script `pdserve`."""

from pdserve.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
