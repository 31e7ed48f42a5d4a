"""`python -m headrace` is the same as `headrace`."""

from __future__ import annotations

from headrace.cli import main

if __name__ == "__main__":
    main()
