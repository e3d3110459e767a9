"""``python -m planaria``: the command where its console script is not on PATH, as in a submitted job."""

from planaria.cli import main

if __name__ == "__main__":
    main()
