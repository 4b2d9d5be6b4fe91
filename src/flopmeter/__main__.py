"""`python -m flopmeter` is `flopmeter`."""

from flopmeter.cli import main

if __name__ == "__main__":
    main()
