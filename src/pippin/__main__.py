"""`python -m pippin`."""

from pippin.cli import main

if __name__ == "__main__":
    main()
